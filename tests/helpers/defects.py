"""Defects of a compiled loop, brought in so that the tiers of accelerators find them."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on

from jaxspec.core import cache as caches
from jaxspec.models import transformer


def copied_cache(monkeypatch):
    """As a loop under vmap does, the commit chooses between the old cache and the new one."""
    commit = caches.commit

    def chosen(cache, entries, count, after=0):
        new = commit(cache, entries, count, after)
        some = (count > 0)[None, :, None, None, None]
        return new._replace(kv=jax.tree.map(lambda a, b: jnp.where(some, a, b), new.kv, cache.kv))

    monkeypatch.setattr(caches, "commit", chosen)


def call_of_the_host(monkeypatch):
    """The number of committed tokens goes through the host."""
    commit = caches.commit

    @compute_on("device_host")
    @jax.jit
    def told(count):
        return jnp.minimum(count, 1000)

    monkeypatch.setattr(
        caches, "commit", lambda cache, entries, count, after=0: commit(cache, entries, told(count), after)
    )


def gathered_table(monkeypatch):
    """Every device collects the embedding, before it reads a row of it."""
    look_up = transformer.look_up
    monkeypatch.setattr(
        transformer, "look_up", lambda table, tokens: look_up(lax.with_sharding_constraint(table, jax.P()), tokens)
    )
