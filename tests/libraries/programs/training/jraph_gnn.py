"""jraph: a graph network that is trained on batched graphs, padded, with haiku's layers and optax."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from program_edits import edits


def graph_of(seed):
    random = np.random.default_rng(seed)
    return jraph.GraphsTuple(
        nodes=random.normal(size=(5, 3)).astype(np.float32), edges=random.normal(size=(7, 2)).astype(np.float32),
        senders=random.integers(0, 5, 7), receivers=random.integers(0, 5, 7), n_node=np.array([5]),
        n_edge=np.array([7]), globals=np.zeros((1, 2), np.float32),
    )  # fmt: skip


def network(graph):
    @jraph.concatenated_args
    def update(features):
        return hk.nets.MLP([8, 4])(features)

    return jraph.GraphNetwork(update_edge_fn=update, update_node_fn=update, update_global_fn=update)(graph)


def main():
    net, optimizer = hk.without_apply_rng(hk.transform(network)), optax.adam(1e-2)
    graphs = jraph.pad_with_graphs(jraph.batch_np([graph_of(seed) for seed in range(4)]), 24, 32, 6)
    params = net.init(jax.random.key(0), graphs)

    @jax.jit
    def update(params, state, graphs):
        def loss_of(params):
            mask = jraph.get_graph_padding_mask(graphs)
            return jnp.sum(mask * jnp.sum(net.apply(params, graphs).globals ** 2, axis=-1)) / mask.sum()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state)
        edits.log(loss=loss)
        return optax.apply_updates(params, updates), state, loss

    step, state, losses = edits.wrap(update), optimizer.init(params), []
    for _ in range(10):
        params, state, loss = step(params, state, graphs)
        losses.append(loss)
    print("losses", [float(loss) for loss in losses])
    return params, state, losses
