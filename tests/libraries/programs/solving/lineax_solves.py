"""lineax: the README's solve, an iterative one by CG of an operator that is a function, and their gradients."""

import jax
import jax.numpy as jnp
import lineax as lx

from program_edits import edits


def main():
    matrix = jax.random.normal(jax.random.key(0), (6, 6))
    vector = jax.random.normal(jax.random.key(1), (6,))

    @jax.jit
    def solve(matrix, vector):
        solution = lx.linear_solve(lx.MatrixLinearOperator(matrix), vector)
        edits.log(norm=jnp.linalg.norm(solution.value))
        return solution.value

    @jax.jit
    def iterative(matrix, vector):
        operator = lx.FunctionLinearOperator(
            lambda x: matrix.T @ (matrix @ x) + x,
            jax.eval_shape(lambda: vector),
            lx.positive_semidefinite_tag,
        )
        return lx.linear_solve(operator, vector, solver=lx.CG(rtol=1e-6, atol=1e-6)).value

    solutions = edits.wrap(solve)(matrix, vector), iterative(matrix, vector)
    gradients = jax.grad(lambda m: jnp.sum(solve(m, vector) * iterative(m, vector)))(matrix)
    print("residual", jnp.abs(matrix @ solutions[0] - vector).max())
    return solutions, gradients
