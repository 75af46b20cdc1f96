"""Defects of a compiled loop, brought in so that the tiers of accelerators find them."""

import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.core import cache as caches
from jaxspec.decode import target_call
from jaxspec.models import layer_calls, sharding
from jaxspec.train import placement


def copied_cache(monkeypatch):
    """As a loop under vmap does, a write chooses between the old cache and the new one."""
    write = caches.write_entries

    def chosen(cache, entries, count, after=0):
        some = jnp.broadcast_to(after >= 0, count.shape)[None, :, None, None, None]
        return jax.tree.map(lambda a, b: jnp.where(some, a, b), write(cache, entries, count, after), cache.stores)

    monkeypatch.setattr(caches, "write_entries", chosen)


def call_of_the_host(monkeypatch):
    """The drawn token goes through the host."""
    write = caches.write_entries

    @compute_on("device_host")
    @jax.jit
    def told(token):
        return jnp.maximum(token, 0)

    monkeypatch.setattr(
        caches, "write_entries", lambda cache, entries, count, after=0: write(cache, entries, count, told(after))
    )


def gathered_table(monkeypatch):
    """Every device collects the embedding, before it reads a row of it."""
    look_up = layer_calls.look_up
    monkeypatch.setattr(
        layer_calls, "look_up", lambda table, tokens: look_up(lax.with_sharding_constraint(table, jax.P()), tokens)
    )


def joined_calls(monkeypatch):
    """XLA compiles the target's call together with the operations of the drafter and the rule."""
    for module in (target_call, layer_calls):
        monkeypatch.setattr(module, "lax", types.SimpleNamespace(optimization_barrier=lambda values: values))


def gathered_activations(monkeypatch):
    """Every device has the embeddings of all tokens, as XLA chooses for a table whose columns are split."""

    def take(self, tokens):
        return self if tokens is Ellipsis else lax.with_sharding_constraint(self.values[tokens], _whole(self.mesh))

    monkeypatch.setattr(sharding.SplitTable, "__getitem__", take)


def gathered_embedding(monkeypatch):
    """Every device collects the embedding of a target in training."""

    def take(self, tokens):
        return self if tokens is Ellipsis else lax.with_sharding_constraint(self.values, _whole(self.mesh))[tokens]

    monkeypatch.setattr(sharding.SplitTable, "__getitem__", take)


def added_activations(monkeypatch):
    """The target's matrices are multiplied where they lie, so that products are added up over devices."""
    monkeypatch.setattr(sharding, "collect", lambda params, mesh: params)


def whole_gradients(monkeypatch):
    """Every device receives the whole sum of all gradients, and keeps its part."""

    def add_up(total, axes, *, scatter_dimension, tiled):
        size = total.shape[scatter_dimension] // lax.axis_size(axes)
        whole = lax.optimization_barrier(lax.psum(total, axes))
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(axes) * size, size, scatter_dimension)

    monkeypatch.setattr(placement, "lax", types.SimpleNamespace(**vars(lax) | {"psum_scatter": add_up}))


def _whole(mesh):
    return NamedSharding(mesh, P())
