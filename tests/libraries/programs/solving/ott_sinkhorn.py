"""ott: the distance of two point clouds by Sinkhorn's algorithm, and its gradient."""

import jax
import jax.numpy as jnp
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

from program_edits import edits


def main():
    x = jax.random.normal(jax.random.key(0), (12, 2))
    y = jax.random.normal(jax.random.key(1), (10, 2)) + 1.0
    solver = sinkhorn.Sinkhorn(max_iterations=200)

    def distance(x):
        out = solver(linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=0.1)))
        edits.log(cost=out.reg_ot_cost)
        return out.reg_ot_cost

    step = edits.wrap(jax.jit(jax.value_and_grad(distance)))
    costs = []
    for _ in range(3):
        cost, gradient = step(x)
        x = x - 0.1 * gradient
        costs.append(cost)
    print("costs", [float(cost) for cost in costs])
    return x, costs, jnp.stack(costs)
