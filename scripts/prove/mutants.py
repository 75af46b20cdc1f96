"""Reintroduces bugs that others shipped, one at a time; the tests must find each.

    make mutants                                     # all of them
    python scripts/prove/mutants.py NAME ...               # some
    python scripts/prove/mutants.py --clean 20             # the same tests on the clean tree, with 20 seeds: all green

A mutant is a copy of the package with one line changed. It is killed if one of its tests fails by an assertion.
"""

# ruff: noqa: E501 - lines are quoted as they stand

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from jaxspec.bench.measurements import add_record, write_record
from jaxspec.kernels.library import VARIABLE

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 600
USUAL = "not slow and not tpu and not gpu"
SLOW = "slow and not tpu and not gpu"
"""Run where all the usual tests pass."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
        name: of the mutant.
        bug: what it does, and who shipped it.
        file: within the package.
        old, new: the line, and what takes its place; `old` stands there exactly once.
        tests: pytest's names of the tests that must not all pass.
        kernels: the kind of CPU kernels with the defect, as in JAXSPEC_KERNELS; None for those of this processor.
    """

    name: str
    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    kernels: str | None = None


def exact(rule: str) -> tuple[str, ...]:
    return (f"tests/rules/test_exact.py::test_a_round_follows_the_target_exactly[{rule}]",)


def sampled(cell: str) -> tuple[str, ...]:
    return (f"tests/testing/test_gtest.py::test_text_follows_its_law[{cell}]",)


ROLLOUT = "tests/generation/test_rollout.py"
DELTA = "tests/models/test_delta.py"
EXPERTS = "tests/models/test_experts.py"
WATERMARK = "tests/processors/test_watermark.py"

MUTANTS = (
    Mutant(
        "block-stops-at-the-first-failure",
        "block verification breaks at the first failed test (demanded in a review of vllm-ascend #11985)",
        "rules/block.py",
        "return StopLaw(accepted * jnp.concatenate([deeper[1:], jnp.ones_like(deeper[:1])]), after)",
        "return StopLaw(jnp.cumprod(accepted) * jnp.append(1 - accepted[1:], 1.0), after)",
        exact("block"),
    ),
    Mutant(
        "block-accepts-as-tokens-do",
        "block verification with the acceptance of single tokens (vllm-ascend #7807)",
        "rules/block.py",
        "weight = sums - jnp.maximum(lax.cummax(sums), 0.0)",
        "weight = jnp.cumsum(jnp.where(last, -jnp.inf, jnp.minimum(ratio, 0.0)))[:-1]",
        exact("block"),
    ),
    Mutant(
        "block-residual-unscaled",
        "the residual of block verification is that of single tokens, without the weight of its path",
        "rules/block.py",
        "return excess(jnp.exp(weight[node] + law[node]), ",
        "return excess(jnp.exp(law[node]), ",
        exact("block"),
    ),
    Mutant(
        "residual-is-the-target",
        "after a rejection the token is drawn from the target, not from its excess over the draft",
        "rules/_siblings.py",
        "target = jnp.where(proposed & (mass > 0), residual / jnp.where(mass > 0, mass, 1.0), target)",
        "target = jnp.where(proposed, target, target)",
        exact("rejection"),
    ),
    Mutant(
        "siblings-with-replacement",
        "the draft's law keeps a rejected sibling, though siblings are drawn without replacement",
        "rules/_siblings.py",
        "draft = jnp.where(proposed, remove_token(draft, token), draft)",
        "draft = jnp.where(proposed, draft, draft)",
        exact("rejection"),
    ),
    Mutant(
        "residual-not-a-number",
        "an empty residual is normalised to NaN (p /= p.sum() in transformers and EAGLE)",
        "rules/_siblings.py",
        "jnp.where(proposed & (mass > 0), residual / jnp.where(mass > 0, mass, 1.0), target)",
        "jnp.where(proposed, residual / mass, target)",
        exact("rejection"),
    ),
    Mutant(
        "equality-then-residual",
        "a rejected deterministic draft may be drawn again (accept by equality, then draw from all of the target)",
        "rules/deterministic.py",
        "rest = jnp.where(spent, -jnp.inf, law[node])",
        "rest = jnp.where(spent, law[node], law[node])",
        exact("deterministic"),
    ),
    Mutant(
        "traversal-in-pre-order",
        "a tree is tested from its root instead of from its leaves",
        "rules/traversal.py",
        "tree.ranks[jnp.maximum(tree.paths, 0)], nodes)",
        "tree.ranks[jnp.maximum(tree.paths, 0)], -1)",
        exact("traversal"),
    ),
    Mutant(
        "typical-max",
        "typical acceptance takes the larger threshold, max(epsilon, delta exp(-H)) (abyo-speculate)",
        "rules/typical.py",
        "threshold = jnp.minimum(",
        "threshold = jnp.maximum(",
        ("tests/rules/test_lossy.py::test_typical_acceptance_is_the_formula",),
    ),
    Mutant(
        "zero-probability-at-u-0",
        "u <= ratio keeps a token of probability 0 when u is 0 (transformers, EAGLE, sglang-jax)",
        "decode/verify.py",
        "jnp.argmax(sums > jnp.minimum(",
        "jnp.argmax(sums >= jnp.minimum(",
        ("tests/decode/test_degenerate.py::test_a_number_of_zero_or_almost_one_picks_nothing_impossible",),
    ),
    Mutant(
        "token-from-the-row-before",
        "correction and bonus are drawn after the node before (openvino.genai #4190)",
        "decode/verify.py",
        "return node, law.next_logits(node)",
        "return node, law.next_logits(jnp.maximum(node - 1, 0))",
        sampled("rejection-8-near"),
    ),
    Mutant(
        "draft-and-residual-share-noise",
        "the draft is drawn with the noise the residual is drawn with (vLLM #47386, #54282)",
        "core/draw.py",
        "extra = self.noise.fresh(nodes, logits.shape[-1])",
        "extra = self.noise.target(depth)",
        sampled("traversal-8-far") + sampled("block-64-near"),
    ),
    Mutant(
        "draft-noise-of-every-round-the-same",
        "draft noise is keyed by node, not by round (a speculator that bypasses the salted stream, local-inference #205)",
        "core/noise.py",
        "numbers = jnp.broadcast_to(roots[:, None], shape), jnp.broadcast_to(nodes, shape)",
        "numbers = (jnp.broadcast_to(nodes, shape),)",
        ("tests/decode/test_randomness.py::test_no_two_places_share_a_number",),
    ),
    Mutant(
        "acceptance-number-of-every-round-the-same",
        "one acceptance number for all rounds of a row (the same u again: vllm-ascend #16370)",
        "core/noise.py",
        "_fold_all(keys, _ACCEPT, (roots,))",
        "_fold_all(keys, _ACCEPT, ())",
        ("tests/decode/test_randomness.py::test_no_two_places_share_a_number",),
    ),
    Mutant(
        "argmax-draft-soft-law",
        "the draft is the argmax, and its law the softmax (jaymody/speculative-sampling #3, rlx)",
        "core/draw.py",
        "perturbed = law + jnp.where(greedy, 0.0, extra)",
        "perturbed = law",
        sampled("rejection-8-near"),
    ),
    Mutant(
        "law-before-truncation",
        "the draft is drawn from the truncated law and weighed by the full one (transformers #47932)",
        "core/draw.py",
        "return tokens, law",
        "return tokens, None if law is None else jax.nn.log_softmax(temper_logits(logits, self.sampling), -1)",
        sampled("rejection-8-near"),
    ),
    Mutant(
        "top-p-missing-in-verification",
        "the verifier ignores top-p (mlc-llm #2940, abyo-speculate)",
        "decode/verify.py",
        "law = log_law(jnp.where(finite[..., None], score, 0.0), rows)",
        "law = log_law(jnp.where(finite[..., None], score, 0.0), dataclasses.replace(rows, top_p=jnp.ones_like(rows.top_p)))",
        sampled("rejection-8-near"),
    ),
    Mutant(
        "temperature-missing",
        "the temperature is not applied (vllm-ascend #6685)",
        "core/laws.py",
        "return jnp.where(temperature < MIN_TEMPERATURE, logits, logits / jnp.maximum(temperature, MIN_TEMPERATURE))",
        "return jnp.where(temperature < MIN_TEMPERATURE, logits, logits)",
        ("tests/core/test_sampling.py::test_scores_are_tempered_biased_and_limited",),
    ),
    Mutant(
        "settings-without-classes",
        "programs do not know the classes of processors, so that one that was compiled for another may run (JAX 0.10)",
        "core/sampling.py",
        "tuple(map(type, self.processors)) if isinstance(self.processors, tuple) else None",
        "None",
        ("tests/core/test_sampling.py::test_programs_know_the_classes_of_processors",),
    ),
    Mutant(
        "counts-of-rejected-nodes",
        "processors absorb the whole path of a round, not the tokens that are committed (SGLang #33643's kind)",
        "decode/commit.py",
        "state.sampling.processors, state.processed, tokens, count,",
        "state.sampling.processors, state.processed, tokens, jnp.full_like(count, tokens.shape[1]),",
        ("tests/processors/test_forcing.py::test_texts_are_those_of_numpy_with_any_drafter",),
    ),
    Mutant(
        "count-of-the-last-token-only",
        "processors absorb one token of a round (SGLang #33643)",
        "decode/commit.py",
        "state.sampling.processors, state.processed, tokens, count,",
        "state.sampling.processors, state.processed, tokens, jnp.minimum(count, 1),",
        ("tests/processors/test_forcing.py::test_texts_are_those_of_numpy_with_any_drafter",),
    ),
    Mutant(
        "nodes-without-their-paths",
        "every node, and the bonus token, is processed by the committed text alone (TensorRT-LLM #18892's kind)",
        "decode/verify.py",
        "return process(self.sampling.processors, self.states, paths, widened(logits))",
        "return process(self.sampling.processors, self.states, paths[..., :0], widened(logits))",
        ("tests/processors/test_forcing.py::test_texts_are_those_of_numpy_with_any_drafter",),
    ),
    Mutant(
        "mask-after-top-k",
        "processors change the scores that temperature and top-k have changed",
        "decode/verify.py",
        "return scores(processing.change(jnp.take_along_axis(logits, nodes[..., None], 1), nodes), rows)",
        "return processing.change(scores(jnp.take_along_axis(logits, nodes[..., None], 1), rows), nodes)",
        ("tests/processors/test_processors.py::test_plain_decoding_is_that_of_numpy",),
    ),
    Mutant(
        "minimum-counts-rounds",
        "min_new_tokens counts rounds, so that texts become longer (SGLang #33643)",
        "processors/minimum.py",
        "state.number + jnp.maximum(count - jnp.maximum(start, 0), 0)",
        "state.number + (count > jnp.maximum(start, 0))",
        ("tests/processors/test_check_processor.py::test_members_have_the_properties[min-new-tokens]",),
    ),
    Mutant(
        "forced-token-beside-another",
        "a draft keeps its own token below a node that forces one",
        "decode/forcing.py",
        "tokens = jnp.where(above >= 0, jnp.where(tree.ranks == 0, above, -1), tokens)",
        "tokens = jnp.where((above >= 0) & (tokens < 0), jnp.where(tree.ranks == 0, above, -1), tokens)",
        ("tests/processors/test_forcing.py::test_forced_tokens_are_drafted_whatever_the_drafter_finds",),
    ),
    Mutant(
        "automaton-by-the-first-child",
        "the automaton advances by the first child of each node, not by the path (the kind of TensorRT-LLM #18892)",
        "decode/forcing.py",
        "found = tokens[jnp.arange(len(nodes))[:, None, None], jnp.maximum(nodes, 0)]",
        "found = tokens[jnp.arange(len(nodes))[:, None, None], jnp.maximum(nodes - jnp.take_along_axis(proposal.tree.ranks, jnp.maximum(nodes, 0).reshape(len(nodes), -1), 1).reshape(nodes.shape), 0)]",
        ("tests/processors/test_grammar.py::test_drafts_change_neither_texts_nor_log_probabilities[chaos]",),
    ),
    Mutant(
        "forced-by-the-state-of-the-root",
        "below a forced token the state of its parent is used again",
        "decode/forcing.py",
        "return tokens, jax.tree.map(lambda new, old: _select(here, new, old), after, states)",
        "return tokens, states",
        ("tests/processors/test_forcing.py::test_forced_tokens_are_drafted_whatever_the_drafter_finds",),
    ),
    Mutant(
        "stop-tokens-in-every-state",
        "a text may end anywhere (a grammar that masks only tokens of text)",
        "processors/grammar.py",
        "table[start : start + states, STOP] = np.where(one.final, ENDED, DEAD)",
        "table[start : start + states, STOP] = ENDED",
        ("tests/processors/test_grammar.py::test_plain_decoding_is_that_of_a_search_over_bytes",),
    ),
    Mutant(
        "grammar-reads-the-prompt",
        "the automaton reads the prompt, too, so that a trigger in it starts the grammar (vLLM #44297's kind)",
        "processors/grammar.py",
        "new = (index < count[:, None]) & (index >= start[:, None])",
        "new = index < count[:, None]",
        ("tests/processors/test_grammar.py::test_plain_decoding_is_that_of_a_search_over_bytes",),
    ),
    Mutant(
        "classes-by-the-first-state",
        "tokens that the first state treats alike are one class",
        "core/automaton.py",
        "columns, number = np.unique(table[:, used], axis=1, return_inverse=True)",
        "_, first, number = np.unique(table[0, used], return_index=True, return_inverse=True)\n    columns = table[:, used[first]]",
        ("tests/processors/test_grammar.py::test_plain_decoding_is_that_of_a_search_over_bytes",),
    ),
    Mutant(
        "dead-ends-are-allowed",
        "a token is allowed although no text of tokens can be completed after it",
        "core/automaton.py",
        "alive = leads_to(table, final)",
        "alive = np.ones_like(final)",
        ("tests/core/test_automaton.py::test_tokens_are_allowed_as_a_search_over_bytes_finds",),
    ),
    Mutant(
        "one-key-for-the-batch",
        "every row draws with the first row's key (per-request parameters: vLLM #9834; rbg keys under vmap)",
        "core/noise.py",
        "_fold_all(keys[:, None], tag, numbers)",
        "_fold_all(keys[:1, None], tag, numbers)",
        ("tests/core/test_noise.py",),
    ),
    Mutant(
        "coarse-noise",
        "noise of 23 bits never draws a token of probability 1e-8 (the default of jax.random.gumbel)",
        "core/threefry.py",
        "jnp.where(high >= 0.5, high, high + rest)",
        "jnp.maximum(high, 2.0**-23)",
        ("tests/core/test_sampling.py::test_the_tail_of_a_large_vocabulary_is_drawn",),
    ),
    Mutant(
        "calls-of-several-widths",
        "a call of the target is as wide as the drafter's tree, though one width was asked for (bfloat16 rounds by width)",
        "decode/loop.py",
        "window = widen(window, self.canonical_width)",
        "window = widen(window, proposal.tokens.shape[1])",
        ("tests/decode/test_canonical_width.py::test_every_drafter_has_the_bits_of_plain_decoding",),
    ),
    Mutant(
        "no-bonus-token",
        "a draft kept whole emits no token of the target's after it (rlx)",
        "decode/commit.py",
        "sound = jnp.minimum(reached + 1, first(~healthy))",
        "sound = jnp.minimum(jnp.minimum(reached + 1, steps.size - 1), first(~healthy))",
        ("tests/decode/test_identity.py::test_a_right_draft_is_accepted_whole",),
    ),
    Mutant(
        "broken-logits-go-on",
        "logits that are not finite are drawn from (vLLM #45060, #50183, #53029)",
        "decode/commit.py",
        "sound = jnp.minimum(reached + 1, first(~healthy))",
        "sound = reached + 1",
        ("tests/decode/test_invariants.py::test_logits_that_are_not_finite_end_the_row",),
    ),
    Mutant(
        "rejected-token-is-kept",
        "the cache keeps the first nodes of the draft instead of the accepted path (abyo-speculate's rollback)",
        "decode/loop.py",
        "commit(state.cache, entries, nodes, count, ",
        "commit(state.cache, entries, jnp.where(nodes >= 0, jnp.arange(nodes.shape[1]), -1), count, ",
        ("tests/decode/test_invariants.py::test_cache_equals_fresh_prefill",),
    ),
    Mutant(
        "last-token-is-not-kept",
        "the last token of an accepted path is not written to the cache of a CPU",
        "core/cache.py",
        "lax.fori_loop(0, count[b], functools.partial(token, b), slots)",
        "lax.fori_loop(0, count[b] - 1, functools.partial(token, b), slots)",
        ("tests/core/test_cache.py::test_commit_keeps_the_first_tokens_of_each_path",),
    ),
    Mutant(
        "rejected-tokens-change-the-state",
        "the state of a recurrent layer also takes the tokens after the accepted ones (transformers #49036)",
        "models/delta.py",
        "real, started = jnp.arange(size) < count[:, None], length > 0",
        "real, started = jnp.arange(size) >= 0 * count[:, None], length > 0",
        (f"{DELTA}::test_a_commit_adds_a_path_to_the_text[XLA-two]",),
    ),
    Mutant(
        "convolution-by-window-index",
        "the convolution of a recurrent layer reads the tokens before a token in the window, not on its path",
        "models/delta.py",
        "inside = (mask & (rank == (depth - back)[..., None])).argmax(-1)",
        "inside = jnp.maximum(mask.shape[2] - mask.shape[1] + jnp.arange(mask.shape[1]) - back, 0) + 0 * rank[..., 0]",
        (f"{DELTA}::test_every_node_is_its_path_read_token_by_token[XLA-two-lengths0]",),
    ),
    Mutant(
        "shortened-text-keeps-its-state",
        "a row whose text is read again begins with the state of the old text",
        "models/delta.py",
        "state = jnp.where(started[:, None, None, None], store.state, 0)",
        "state = store.state",
        (f"{DELTA}::test_a_row_of_length_0_is_empty_whatever_its_store_holds[XLA]",),
    ),
    Mutant(
        "router-normalised-over-all-experts",
        "the weights of a token's experts are their shares among all experts, not among its own",
        "models/experts.py",
        "weights / weights.sum(-1, keepdims=True) if sizes.normalise else weights",
        "weights",
        (f"{EXPERTS}::test_the_sum_is_that_of_each_rows_experts[sizes0]",),
    ),
    Mutant(
        "router-normalised-over-few-experts",
        "a network whose config.json says norm_topk_prob false has weights that sum to 1",
        "models/experts.py",
        "weights / weights.sum(-1, keepdims=True) if sizes.normalise else weights",
        "weights / weights.sum(-1, keepdims=True)",
        (f"{EXPERTS}::test_the_sum_is_that_of_each_rows_experts[sizes1]",),
    ),
    Mutant(
        "router-of-the-kernel-normalised-over-all",
        "the CPU kernel exchanges the two sums that the weights of experts are divided by",
        "kernels/src/experts.h",
        "  if (normalise)\n",
        "  if (!normalise)\n",
        (f"{EXPERTS}::test_with_the_kernel_no_row_depends_on_another",),
    ),
    Mutant(
        "expert-of-other-rows",
        "the loop over the experts in use reads the first experts of the layer instead of them",
        "models/experts.py",
        "expert = order[i]",
        "expert = i",
        (f"{EXPERTS}::test_the_sum_is_that_of_each_rows_experts[sizes0]",),
    ),
    Mutant(
        "expert-of-other-rows-in-the-kernel",
        "the CPU kernel reads the first experts of the layer instead of those in use",
        "kernels/src/ffi.cpp",
        "expert = used[at / matrices.blocks], start",
        "expert = at / matrices.blocks, start",
        (f"{EXPERTS}::test_with_the_kernel_no_row_depends_on_another",),
    ),
    Mutant(
        "watermark-of-repeated-contexts",
        "equal tokens before a new token always get the same noise, and a text repeats itself",
        "processors/watermark.py",
        "return noise_keys(secret, last, times)",
        "return noise_keys(secret, last, 0 * times)",
        (f"{WATERMARK}::test_the_noise_is_of_the_secret_the_last_tokens_and_how_often_they_stood_there",),
    ),
    Mutant(
        "watermark-counts-the-prompt",
        "the prompt counts as text that has its contexts already, which a detector without the prompt cannot know",
        "processors/watermark.py",
        "written = (at >= state.begin[:, None]) & (at < state.length[:, None])",
        "written = at < state.length[:, None]",
        (f"{WATERMARK}::test_the_noise_is_of_the_secret_the_last_tokens_and_how_often_they_stood_there",),
    ),
    Mutant(
        "watermark-ignores-the-path",
        "tokens of a drafted path do not count as text, so that the noise depends on the drafts",
        "processors/watermark.py",
        "times += _count_repeats(own, last, beyond[:, None] & (path >= 0))",
        "times += 0",
        (f"{WATERMARK}::test_tokens_of_drafted_paths_count_as_text",),
    ),
    Mutant(
        "tiles-of-experts-by-rows",
        "the kernels for GPUs multiply the experts in smaller tiles for few rows, and a draft changes a row's bits",
        "models/experts_pallas.py",
        'outputs, step = tile_size(width, OUTPUTS, "outputs"), tile_size(inputs, INPUTS, "units")',
        'outputs, step = tile_size(width, OUTPUTS, "outputs"), tile_size(inputs, 64 if rows > 16 else 16, "units")',
        (f"{EXPERTS}::test_the_kernels_for_gpus_have_the_same_sum_and_no_row_depends_on_another[bfloat16-False]",),
    ),
    Mutant(
        "ranges-of-experts-by-other-rows",
        "the kernels for GPUs add equal numbers of the experts in use, which depend on the other rows",
        "models/experts_pallas.py",
        "before[-1:], before[ends])",
        "before[-1:], before[-1] * jnp.arange(ranges + 1) // ranges)",
        (f"{EXPERTS}::test_the_kernels_for_gpus_have_the_same_sum_and_no_row_depends_on_another[bfloat16-False]",),
    ),
    Mutant(
        "expert-of-no-row-in-the-kernels-for-gpus",
        "an expert's outputs are multiplied by 0 for rows without it, where it may overflow",
        "models/experts_pallas.py",
        'jnp.where(found["has"][expert, tile][:, None] > 0, out, 0)',
        "out",
        (f"{EXPERTS}::test_an_expert_that_overflows_in_the_kernels_for_gpus_harms_only_its_rows",),
    ),
    Mutant(
        "shared-expert-without-its-gate",
        "the output of the shared expert is added whole (tests with a gate near 1 miss it)",
        "models/experts.py",
        "shared * jax.nn.sigmoid(lax.optimization_barrier(gate))",
        "shared",
        (f"{EXPERTS}::test_the_sum_is_that_of_each_rows_experts[sizes0]",),
    ),
    Mutant(
        "price-counts-tokens",
        "the price of a window counts the experts of each token, and not each expert once",
        "core/theory.py",
        "self.total * (1 - (1 - self.per_token / self.total) ** tokens)",
        "self.per_token * tokens",
        ("tests/schedules/test_best_width.py::test_experts_make_width_dear",),
    ),
    Mutant(
        "router-of-a-drafting-layer-rounded",
        "the router of a layer for multi-token prediction has the dtype of the matrices",
        "drafters/_tapped.py",
        "if is_matrix(path[-1].key, a.ndim) else a",
        "if a.ndim > 1 else a",
        ("tests/heads/test_mtp.py::test_experts_have_the_dtype_of_the_target",),
    ),
    Mutant(
        "drafting-layer-priced-whole",
        "the default chain of a layer for multi-token prediction counts all experts in every call",
        "drafters/eagle.py",
        "count_bytes(target.params, experts, length + 1)",
        "count_bytes(target.params)",
        ("tests/heads/test_mtp.py::test_the_default_chain_is_priced_by_the_experts_of_its_tokens",),
    ),
    Mutant(
        "stop-token-within-the-draft",
        "a stop token inside an accepted draft is passed over (transformers' prompt lookup, #31301)",
        "decode/commit.py",
        "& (steps < sound[:, None]))",
        "& (steps == reached[:, None]))",
        (
            "tests/decode/test_invariants.py::test_the_cut_inside_an_accepted_path",
            "tests/decode/test_identity.py::test_toy_text_is_that_of_plain_decoding",
        ),
    ),
    Mutant(
        "positions-by-node",
        "a node's position is its number, not its depth (padded batches: arXiv:2510.22876)",
        "decode/loop.py",
        "positions = state.cache.length[:, None] + tree.depths",
        "positions = state.cache.length[:, None] + jnp.arange(tree.depths.shape[-1])",
        ("tests/decode/test_invariants.py::test_cache_equals_fresh_prefill",),
    ),
    Mutant(
        "siblings-see-each-other",
        "a causal mask instead of the tree's ancestors",
        "decode/loop.py",
        "window = Window(jnp.maximum(proposal.tokens, 0), positions, tree.ancestors, paths)",
        "window = Window(jnp.maximum(proposal.tokens, 0), positions, jnp.tril(jnp.ones_like(tree.ancestors)), paths)",
        ("tests/decode/test_identity.py::test_toy_text_is_that_of_plain_decoding",),
    ),
    Mutant(
        "sums-by-the-number-of-rows",
        "from three rows on, a product rounds before it adds: other bits than one row alone",
        "kernels/src/products.h",
        "sum[b][r] = Kind::add(sum[b][r], w[b], value);",
        "if constexpr (R > 2 && std::is_same_v<Kind, Float32>) sum[b][r] = Lanes{w[b]} * Lanes{value} + sum[b][r]; else sum[b][r] = Kind::add(sum[b][r], w[b], value);",
        ("tests/kernels/test_kernels.py::test_products_are_those_of_xla_and_no_row_depends_on_another",),
    ),
    Mutant(
        "few-rows-without-tiles",
        "with AMX, up to four rows are multiplied without tile registers: other bits than in a wide window",
        "kernels/src/kernels.h",
        "if (p.width % kTileInputs == 0)",
        "if (p.width % kTileInputs == 0 && p.rows > 4)",
        ("tests/kernels/test_kernels.py::test_products_are_those_of_xla_and_no_row_depends_on_another",),
        kernels="AMX",
    ),
    Mutant(
        "a-lane-too-many",
        "a norm adds the squares of the next row's first values",
        "kernels/src/rows.h",
        "if (rest) sum = fma(load(x + whole, rest), load(x + whole, rest), sum);",
        "if (rest) sum = fma(load(x + whole), load(x + whole), sum);",
        ("tests/kernels/test_kernels.py::test_norms_are_those_of_xla_and_no_row_depends_on_another",),
    ),
    Mutant(
        "a-mask-off-by-one",
        "attention reads the mask of the token before",
        "kernels/src/attention.h",
        "if (masks[q][w]) line[end++] = seen[q][w];",
        "if (w == 0 ? masks[q][w] : masks[q][w - 1]) line[end++] = seen[q][w];",
        ("tests/kernels/test_kernels.py::test_attention_is_that_of_xla",),
    ),
    Mutant(
        "weights-of-the-next-token",
        "attention mixes the values of drafted tokens with the weights of the tokens after them",
        "kernels/src/attention.h",
        "from = begin / unit * unit;",
        "from = (begin + 1) / unit * unit;",
        ("tests/kernels/test_kernels.py::test_attention_is_that_of_xla",),
    ),
    Mutant(
        "drafted-tokens-in-lanes-of-their-own",
        "exponentials of drafted tokens are summed in other lanes than those of cached ones",
        "kernels/src/attention.h",
        "sum = sum + weight;",
        "sum = i > length ? sum + splat(total(weight) / 16) : sum + weight;",
        ("tests/kernels/test_kernels.py::test_bits_of_attention_do_not_depend_on_what_is_cached",),
    ),
    Mutant(
        "pallas-mask-off-by-one",
        "attention in Pallas reads one slot past the text",
        "models/softmax_sums.py",
        "return part & (slots >= first) & (slots < length)",
        "return part & (slots >= first) & (slots <= length)",
        ("tests/models/test_attention_pallas.py::test_values_are_those_of_xla[0]",),
    ),
    Mutant(
        "pallas-sums-by-what-is-cached",
        "attention in Pallas parts a text where the window begins, so its bits depend on what is cached",
        "models/softmax_sums.py",
        "near = jnp.maximum(position // GROUP_TOKENS - 1, 0) * GROUP_TOKENS",
        "near = jnp.maximum(length[:, None] // GROUP_TOKENS - 1, 0) * GROUP_TOKENS + 0 * position",
        (
            "tests/models/test_attention_pallas.py::test_bits_depend_neither_on_the_width_nor_on_what_is_cached[gpu-float32]",
        ),
    ),
    Mutant(
        "pieces-by-rows",
        "pieces of a text are larger where a window has more tokens",
        "models/attention_pieces.py",
        "sizes = _Sizes(batch, tokens, heads, groups, width, before, slots, piece)",
        "sizes = _Sizes(batch, tokens, heads, groups, width, before, slots, piece if tokens < 16 else 2 * piece)",
        (
            "tests/models/test_attention_pieces.py::test_bits_of_a_query_depend_neither_on_the_number_of_rows_nor_on_the_capacity[254]",
        ),
    ),
    Mutant(
        "pieces-of-a-fixed-number",
        "a cache is read in four pieces, so the order of sums depends on its capacity (FlashDecoding's number of splits)",
        "models/attention_pieces.py",
        "sizes = _Sizes(batch, tokens, heads, groups, width, before, slots, piece)",
        "sizes = _Sizes(batch, tokens, heads, groups, width, before, slots, max(piece, slots // 4 // BLOCK * BLOCK))",
        (
            "tests/models/test_attention_pieces.py::test_bits_of_a_query_depend_neither_on_the_number_of_rows_nor_on_the_capacity[254]",
        ),
    ),
    Mutant(
        "pallas-second-tile-of-inputs",
        "products in Pallas read the inputs in smaller tiles for more rows, as timed kernels do (XLA, cuBLAS)",
        "models/products_pallas.py",
        'inputs = tile_size(self.inputs // segments, tile.inputs, "inputs")',
        'inputs = tile_size(self.inputs // segments, tile.inputs if len(self.rows) < 64 else 16, "inputs")',
        ("tests/models/test_products_pallas.py::test_sums_are_chains_over_tiles_and_trees_over_segments[64]",),
    ),
    Mutant(
        "pallas-split-by-rows",
        "products in Pallas split the inputs by the number of rows (XLA's split of K, vLLM #27433)",
        "models/products_pallas.py",
        "segments = segment_count(rows.shape[1])",
        "segments = segment_count(rows.shape[1]) if len(rows) < 64 else 1",
        ("tests/models/test_products_pallas.py::test_sums_are_chains_over_tiles_and_trees_over_segments[64]",),
    ),
    Mutant(
        "pallas-norm-left-to-xla",
        "XLA norms the features between kernels of a fixed order, in an order of its own for each number of rows",
        "models/layer_calls_pallas.py",
        "features = products.normalize(read.x, norm.scale, norm.epsilon, read.batch * read.tokens)",
        "features = norm(read.x)",
        ("tests/models/test_layer_calls.py::test_nothing_between_embedding_and_logits_sums_but_the_kernels[gpu]",),
    ),
    Mutant(
        "tpu-second-block-of-inputs",
        "products in Pallas for a TPU read the inputs in smaller blocks for more rows, as XLA:TPU chooses its windows",
        "models/products_tpu.py",
        '_divisor(self.inputs // segments, block.inputs, "inputs"))',
        '_divisor(self.inputs // segments, block.inputs if len(self.rows) < 64 else 128, "inputs"))',
        ("tests/models/test_products_tpu.py::test_sums_are_chains_over_blocks_and_trees_over_segments[64]",),
    ),
    Mutant(
        "tpu-split-by-rows",
        "products in Pallas for a TPU split the inputs by the number of rows",
        "models/products_tpu.py",
        "segments=segment_count(rows.shape[1]))",
        "segments=segment_count(rows.shape[1]) if len(rows) < 64 else 1)",
        ("tests/models/test_products_tpu.py::test_sums_are_chains_over_blocks_and_trees_over_segments[64]",),
    ),
    Mutant(
        "tpu-norm-left-to-xla",
        "XLA norms the features between kernels for a TPU, in an order that depends on what is beside them",
        "models/layer_calls_tpu.py",
        "return split_rows(products.normalize(read.x, norm), read.batch, read.tokens)",
        "return split_rows(norm(read.x), read.batch, read.tokens)",
        ("tests/models/test_layer_calls.py::test_nothing_between_embedding_and_logits_sums_but_the_kernels[tpu]",),
    ),
    Mutant(
        "mesh-sum-left-to-psum",
        "devices that share a layer leave its sums to an all-reduce, whose order the hardware chooses (NCCL, SGLang #34159)",
        "models/layer_calls_pallas.py",
        "shares = shared_layers.gather(products.multiply_segments(rows, layer.weight, segments))",
        'shares = __import__("jax").lax.psum(products.multiply_segments(rows, layer.weight, segments), "model")[None]',
        ("tests/models/test_layer_calls.py::test_devices_that_share_layers_exchange_numbers_only_by_gathers[gpu]",),
    ),
    Mutant(
        "mesh-segments-by-devices",
        "each device sums its inputs in as many segments as one device would, so their number depends on the devices",
        "models/layer_calls_pallas.py",
        "segments = products.segment_count(rows.shape[1] * shards) // shards",
        "segments = products.segment_count(rows.shape[1])",
        ("tests/models/test_exact_mesh.py::test_logits_and_entries_have_the_bits_of_one_device",),
    ),
    Mutant(
        "mesh-sum-left-to-psum-on-a-tpu",
        "TPUs that share a layer leave its sums to an all-reduce (sglang-jax #1270)",
        "models/layer_calls_tpu.py",
        "shares = shared_layers.gather(products.multiply_segments(rows, layer.weight, segments))",
        'shares = __import__("jax").lax.psum(products.multiply_segments(rows, layer.weight, segments), "model")[None]',
        ("tests/models/test_layer_calls.py::test_devices_that_share_layers_exchange_numbers_only_by_gathers[tpu]",),
    ),
    Mutant(
        "exact-texts-of-tiles-by-rows",
        "with exact=True, products in Pallas read the inputs in smaller tiles for more rows, and a draft changes the text",
        "models/products_pallas.py",
        'inputs = tile_size(self.inputs // segments, tile.inputs, "inputs")',
        'inputs = tile_size(self.inputs // segments, tile.inputs if len(self.rows) < 32 else 16, "inputs")',
        ("tests/models/test_exact_texts.py::test_drafts_and_other_rows_change_no_bit[bfloat16-model-dynamic]",),
    ),
    Mutant(
        "exact-products-without-a-check-of-sizes",
        "exact=True chooses products in Pallas for a vocabulary for which there is no kernel",
        "models/layer_calls_pallas.py",
        '"vocab_size": (config.vocab_size, shards if on_tpu else unit * shards),',
        '"vocab_size": (config.vocab_size, 1),',
        ("tests/models/test_exact.py::test_sizes_without_a_pallas_kernel_leave_the_products_to_xla",),
    ),
    Mutant(
        "norms-by-the-place-of-a-row",
        "rows of odd places are summed backwards",
        "kernels/src/rows.h",
        "for (long i = 0; i < whole; i += kLanes) sum = fma(load(x + i), load(x + i), sum);",
        "for (long i = 0; i < whole; i += kLanes) { const long j = row % 2 ? whole - kLanes - i : i; sum = fma(load(x + j), load(x + j), sum); }",
        ("tests/kernels/test_kernels.py::test_norms_are_those_of_xla_and_no_row_depends_on_another",),
    ),
    Mutant(
        "rotation-of-the-first-token",
        "all tokens are rotated by the first one's angles",
        "kernels/src/ffi.cpp",
        "const float *cosine = cosines.typed_data() + place * half, *sine = sines.typed_data() + place * half;",
        "const float *cosine = cosines.typed_data(), *sine = sines.typed_data();",
        ("tests/kernels/test_kernels.py::test_heads_are_those_of_xla_and_no_token_depends_on_another",),
    ),
    Mutant(
        "residual-of-the-first-row",
        "a product adds the first row's residual stream to all rows",
        "kernels/src/kernels.h",
        "out[i] += p.residual[row * p.outputs + i];",
        "out[i] += p.residual[i];",
        ("tests/kernels/test_kernels.py::test_what_a_product_includes_is_done_as_apart",),
    ),
    Mutant(
        "gate-by-the-other-half",
        "the second half of a row goes through the activation, and the first does not",
        "kernels/src/rows.h",
        "gate = load(x + i, part), up = load(x + width + i, part);",
        "gate = load(x + width + i, part), up = load(x + i, part);",
        ("tests/kernels/test_kernels.py::test_gates_are_those_of_xla",),
    ),
    Mutant(
        "nibbles-of-the-other-half",
        "inputs of the high nibbles are multiplied with the low ones, and the other way round",
        "kernels/src/blocks.h",
        "k < 4 ? 0 : -4",
        "k < 4 ? -4 : 0",
        ("tests/kernels/test_blocks.py::test_products_are_exact_where_sums_are",),
    ),
    Mutant(
        "offset-of-the-first-half",
        "the offset of the second sixteen inputs of a block is taken of the first",
        "kernels/src/table.h",
        "start ? less_second : less_first",
        "less_first",
        ("tests/kernels/test_blocks.py::test_products_are_exact_where_sums_are",),
    ),
    Mutant(
        "minimum-by-the-scale",
        "a block's minimum is multiplied by the whole number of its scale",
        "kernels/src/blocks.h",
        "from_whole(whole + Kind::factors)",
        "from_whole(whole)",
        ("tests/kernels/test_blocks.py::test_products_are_exact_where_sums_are",),
    ),
    Mutant(
        "blocks-by-the-number-of-rows",
        "from three rows on, a block's sum is rounded before it is added: other bits than one row alone",
        "kernels/src/blocks.h",
        "total[r] = fma(whole, Kind::of_output ? one : one * step, total[r]);",
        "total[r] = R > 2 ? whole * (Kind::of_output ? one : one * step) + total[r] : fma(whole, Kind::of_output ? one : one * step, total[r]);",
        ("tests/kernels/test_blocks.py::test_rows_are_rounded_by_32_and_none_depends_on_another",),
    ),
    Mutant(
        "sums-of-sixteen-bits-that-overflow",
        "sixteen products of codes of five bits are summed in 16 bits",
        "kernels/src/blocks.h",
        "bits_ == 5 || bits_ == 6 ? 2 : 1",
        "bits_ == 5 ? 8 : bits_ == 6 ? 2 : 1",
        ("tests/kernels/test_blocks.py::test_the_largest_sums_are_exact",),
        kernels="AVX2",
    ),
    Mutant(
        "blocks-in-the-order-of-the-file",
        "rows of query and key blocks stay as llama.cpp rotates them",
        "checkpoints/gguf_blocks.py",
        "return read_blocks(kind, order(raw))",
        "return read_blocks(kind, raw)",
        ("tests/checkpoints/test_gguf_blocks.py::test_all_weights_are_those_of_the_file",),
    ),
    Mutant(
        "tap-of-the-layer-before",
        "a draft head reads the target's states one layer too early (vLLM #43671)",
        "models/transformer.py",
        "*(calls.residual(streams[tap]) for tap in taps)",
        "*(calls.residual(streams[tap - 1]) for tap in taps)",
        ("tests/models/test_taps.py::test_features_begin_with_those_of_the_target",),
    ),
    Mutant(
        "training-masks-one-off",
        "the mask of a token is that of the token before it (EAGLE's and SpecForge's trainers, in their first step)",
        "train/batch.py",
        "supervised = same & shift_left(batch.mask, steps)",
        "supervised = same & shift_left(batch.mask, steps - 1)",
        ("tests/heads/test_eagle_switches.py::test_losses_and_gradients_of_three_steps[plain]",),
    ),
    Mutant(
        "training-forgets-the-chain",
        "a later step sees the rows of the first step alone, and not its own chain",
        "train/eagle.py",
        "reached = jnp.arange(len(own)) < step",
        "reached = jnp.arange(len(own)) < 0",
        ("tests/train/test_eagle_training.py::test_losses_and_gradients_are_those_of_one_dense_mask[3]",),
    ),
    Mutant(
        "training-chunks-share-a-law",
        "every chunk of positions is compared with the target's law of the first chunk",
        "train/losses.py",
        "near = lax.dynamic_slice_in_dim(features, anchor[0, 0] + 1 + self.first,",
        "near = lax.dynamic_slice_in_dim(features, 1 + self.first,",
        ("tests/train/test_chunks.py::test_chunks_change_neither_losses_nor_gradients[medusa, kl]",),
    ),
    Mutant(
        "training-hosts-end-one-step-apart",
        "a process that wants to end names a step that another process may have passed",
        "backend/processes.py",
        "str(step + STEPS_AHEAD)",
        "str(step)",
        ("tests/train/test_train_hosts.py::test_two_processes_agree_and_end_together",),
    ),
    Mutant(
        "training-hosts-lose-the-kind-of-an-error",
        "an error of process 0 is only its message in the other processes, which take a damaged checkpoint for a failure",
        "backend/processes.py",
        'kind = locate(envelope["error"])',
        "kind = JaxspecError",
        ("tests/train/test_train_hosts.py::test_two_processes_agree_and_end_together",),
    ),
    Mutant(
        "training-checkpoints-are-read-whole",
        "every device gets whole arrays of a checkpoint, and not its own parts",
        "train/checkpoints.py",
        "return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)",
        "return np.zeros(leaf.shape, leaf.dtype)",
        ("tests/train/test_train_mesh.py::test_a_checkpoint_of_split_arrays_is_read_on_other_meshes",),
    ),
    Mutant(
        "training-padded-queries-see-nothing",
        "the queries that pad a chunk see no token, so that their gradient is not a number",
        "train/eagle.py",
        "(3, 1, 3), (0, True, 0), out=3)",
        "(3, 1, 3), (0, False, 0), out=3)",
        ("tests/train/test_chunks.py::test_attention_to_rows_and_chain_in_chunks[1]",),
    ),
    Mutant(
        "training-stands-still",
        "every step of the training-time test stands at the position of the first",
        "train/eagle.py",
        "positions = jnp.broadcast_to(jnp.arange(words.shape[1]) + step, words.shape[:2])",
        "positions = jnp.broadcast_to(jnp.arange(words.shape[1]), words.shape[:2])",
        ("tests/train/test_eagle_training.py::test_losses_and_gradients_are_those_of_one_dense_mask[3]",),
    ),
    Mutant(
        "training-block-sees-its-root",
        "a block in training reads the target's state at its root, which knows the next token",
        "train/dflash.py",
        "(step <= anchors[..., None])",
        "(step <= anchors[..., None] + 1)",
        ("tests/train/test_dflash_training.py::test_a_block_sees_nothing_of_its_own_future[dflash]",),
    ),
    Mutant(
        "training-block-with-gaps",
        "the loss of a block counts tokens after one that does not count",
        "train/batch.py",
        "return supervised & find_supervised(batch, step - 1, True) if blocks and step else supervised",
        "return supervised",
        ("tests/train/test_dflash_training.py::test_a_token_of_a_block_counts_if_all_before_it_do",),
    ),
    Mutant(
        "training-markov-reads-the-token-itself",
        "the Markov head reads the token that it corrects, which no round knows",
        "train/dflash.py",
        "words = head.words(take_anchors(batch, shift_left(batch.tokens, 1 + step)))",
        "words = head.words(take_anchors(batch, shift_left(batch.tokens, 2 + step)))",
        ("tests/train/test_dflash_training.py::test_losses_and_gradients_are_deepspecs[DSpark]",),
    ),
    Mutant(
        "training-mask-sees-its-answer",
        "a mask in training sees the text after its root, and so the token that it names",
        "train/pard.py",
        "behind = same & (step <= anchors[:, :, None] + 1)",
        "behind = same & (step <= anchors[:, :, None] + 2)",
        ("tests/train/test_pard_training.py::test_losses_and_gradients_are_those_of_one_dense_mask",),
    ),
    Mutant(
        "training-masks-of-all-blocks",
        "the masks of a block see those of other blocks, as if the copies of a text were one sequence",
        "train/pard.py",
        "own = jnp.broadcast_to((block[:, None] == block) & (depth[:, None] >= depth), (rows, block.size, block.size))",
        "own = jnp.broadcast_to(depth[:, None] >= depth, (rows, block.size, block.size))",
        ("tests/train/test_pard_training.py::test_each_row_is_the_drafters_with_the_same_tokens",),
    ),
    Mutant(
        "training-losses-of-other-places",
        "the losses of a step are those of other places than its guesses, some of which were dropped",
        "train/batch.py",
        "return batch._replace(anchors=batch.anchors[:, : max(1, int(shares[step] * batch.anchors.shape[1]))])",
        "return batch._replace(anchors=batch.anchors[:, -max(1, int(shares[step] * batch.anchors.shape[1])) :])",
        ("tests/train/test_pard_training.py::test_losses_and_gradients_are_those_of_one_dense_mask",),
    ),
    Mutant(
        "eagle-first-token-kept",
        "an EAGLE head pairs each token with its own state, and not with the one before (vLLM #14464)",
        "drafters/_tapped.py",
        "first = ((advance.start == 0) & (advance.count > 0)).astype(jnp.int32)",
        "first = jnp.zeros_like(advance.start)",
        ("tests/drafters/test_eagle_reference.py::test_dynamic_trees_of_two_rounds[0-eagle1]",),
    ),
    Mutant(
        "eagle-rows-one-late",
        "the drafted tokens of an EAGLE head stand one position too far",
        "drafters/eagle.py",
        "window = as_window(level, cache.length - 1)",
        "window = as_window(level, cache.length)",
        ("tests/drafters/test_eagle_reference.py::test_dynamic_trees_of_two_rounds",),
    ),
    Mutant(
        "eagle-output-not-normed",
        "norm_output norms what the projection reads alone, not what is fed back (SpecForge before #879)",
        "heads/eagle.py",
        "return self._norm(x, self.norm) if self.config.norm_output else x",
        "return x",
        ("tests/heads/test_eagle_switches.py::test_three_steps_after_every_token[3.1]",),
    ),
    Mutant(
        "eagle-residual-not-normed",
        "norm_before_residual is read and not applied (SGLang)",
        "heads/eagle.py",
        "normed if self.config.norm_before_residual else states",
        "states",
        ("tests/heads/test_eagle_switches.py::test_three_steps_after_every_token[one-norm-before]",),
    ),
    Mutant(
        "dflash-markov-reads-the-root",
        "the Markov head reads the root after every node, and not the node's own token",
        "drafters/dflash.py",
        "words = head.words(level.tokens)",
        "words = head.words(jnp.broadcast_to(root[:, None], level.tokens.shape))",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-memory-not-kept",
        "a recurrent Markov head forgets the tokens before the last one",
        "drafters/dflash.py",
        "level.put(memory, new)",
        "memory",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-readings-mixed",
        "the first row of a block names a token in heads in which it names none",
        "drafters/dflash.py",
        "return states[:, self.config.skipped :]",
        "return states[:, : self.shape.depth]",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-block-cut-short",
        "a block has only the rows that the tree needs, though they see the masks after them",
        "heads/dflash_config.py",
        "return depth + self.skipped if self.is_all_causal else self.block_size",
        "return depth + self.skipped",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-doubt-is-a-logit",
        "a schedule compares the logit of a confidence head with a probability",
        "drafters/dflash.py",
        "jax.nn.sigmoid(head.certainty(state_row, words))",
        "head.certainty(state_row, words)",
        ("tests/drafters/test_dflash.py::test_a_confidence_head_is_the_schedules_doubt",),
    ),
    Mutant(
        "dflash-2-one-kernel",
        "the convolution after a sublayer has the kernel of the one before it",
        "heads/dflash.py",
        "kernels[:, :, side, back]",
        "kernels[:, :, 0, back]",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-2-selector-reads-the-root",
        "the selector reads the root after every node, and not the node's own token",
        "drafters/dflash.py",
        "head.select(level.tokens, state_row, logits)",
        "head.select(jnp.broadcast_to(root[:, None], level.tokens.shape), state_row, logits)",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-context-normed-twice",
        "the context takes the norm before attention, which is for the rows of blocks alone",
        "heads/dflash.py",
        "block.heads(context, turned,",
        "block.heads(block.norm(context, block.attn_norm), turned,",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "dflash-block-in-the-cache",
        "the root's row of a block is counted as context",
        "drafters/dflash.py",
        'ids=params.get("tokens")).proposal, state',
        'ids=params.get("tokens")).proposal, DFlashState(state.cache._replace(length=state.cache.length + 1))',
        ("tests/drafters/test_dflash.py::test_after_every_round_the_cache_is_that_of_a_fresh_pass",),
    ),
    Mutant(
        "dflash-block-one-late",
        "a block begins one position after the root",
        "drafters/dflash.py",
        "cache.length[:, None] + rows, cache",
        "cache.length[:, None] + rows + 1, cache",
        ("tests/drafters/test_dflash.py::test_proposals_are_those_computed_by_hand",),
    ),
    Mutant(
        "history-of-another-prompt",
        "a row copies from the texts of another prompt",
        "generation/job.py",
        "self.history[at // self.samples]",
        "self.history[at % len(self.history)]",
        ("tests/generation/test_history.py::test_generate_copies_as_well",),
    ),
    Mutant(
        "history-runs-over-the-end-of-a-text",
        "a copy goes on beyond the end of an earlier text",
        "drafters/prompt_lookup.py",
        "has_texts = context.history is not None",
        "has_texts = False",
        ("tests/drafters/test_prompt_lookup.py::test_the_likeliest_copies_are_proposed",),
    ),
    Mutant(
        "history-forgets-the-prompt",
        "the end of the prompt is not kept before a text, so that its beginning is not found",
        "generation/history.py",
        "jnp.maximum(start - LEAD, 0)",
        "start",
        ("tests/generation/test_history.py::test_the_latest_tokens_are_kept",),
    ),
    Mutant(
        "history-keeps-failed-texts",
        "a text that ended with an error is kept",
        "generation/history.py",
        "kept = (at <= end) & valid[:, None]",
        "kept = at <= end",
        ("tests/generation/test_history.py::test_what_generate_and_rollout_return_is_kept_alike",),
    ),
    Mutant(
        "tree-search-forgets-the-parent",
        "the best tree takes the children of every node for those of the first",
        "core/tree_search.py",
        "min(above[-1], parents - 1) if above else 0, rank]",
        "0, rank]",
        ("tests/core/test_tree_search.py::test_it_equals_the_dynamic_programme_by_the_rank_of_the_parent",),
    ),
    Mutant(
        "ranks-forget-the-token-before",
        "the ranks after a token of any rank are counted together",
        "train/evaluate.py",
        "ranks = column[counted & (before == parent)]",
        "ranks = column[counted]",
        ("tests/train/test_ranks.py::test_trees_know_the_rank_of_the_parent",),
    ),
    Mutant(
        "online-heads-forget-the-start",
        "training from heads starts with new heads of the same sizes",
        "train/online.py",
        "if self.start is None else without_ids(self.start.params)",
        "if self.start is None or self._ids is None else without_ids(self.start.params)",
        ("tests/train/test_online.py::test_heads_to_start_from_are_loaded_from_a_folder",),
    ),
    Mutant(
        "auto-takes-what-is-slower-on-a-prompt",
        "a drafter is chosen that slows one of the prompts down",
        "tuning/auto.py",
        "if min(trial.speedups) >= SLOWEST}",
        "if trial.speedups}",
        ("tests/tuning/test_auto.py::test_a_drafter_that_slows_a_prompt_down_is_not_chosen",),
    ),
    Mutant(
        "auto-refuses-what-was-disturbed",
        "a drafter is refused that was slow on a prompt once, when the machine did other work",
        "tuning/auto.py",
        "fewest, CONFIRMED) if slow else None",
        "fewest, CONFIRMED) if False else None",
        ("tests/tuning/test_auto.py::test_a_prompt_that_seems_slow_is_timed_again",),
    ),
    Mutant(
        "auto-does-not-know-the-price",
        "drafters that copy choose their width by the price of another machine",
        "tuning/auto.py",
        "if price is not None and isinstance(",
        "if price is None and isinstance(",
        ("tests/tuning/test_auto.py::test_the_price_of_tokens",),
    ),
    Mutant(
        "auto-forgets-that-texts-are-sampled",
        "greedy and sampled texts share one answer",
        "tuning/auto.py",
        '"texts": [sampled, rows,',
        '"texts": [rows,',
        ("tests/tuning/test_auto.py::test_another_use_has_another_answer",),
    ),
    Mutant(
        "auto-drops-the-rule",
        "the chosen drafter verifies with the default rule",
        "tuning/auto.py",
        "return dataclasses.replace(drafting, rule=asked.rule, draft=asked.draft",
        "return dataclasses.replace(drafting, draft=asked.draft",
        ("tests/tuning/test_auto.py::test_another_use_has_another_answer",),
    ),
    Mutant(
        "self-int8-keeps-the-type-of-the-cache",
        "the copy of the target in int8 has the cache of the target",
        "models/rounding.py",
        "dtype=ACTIVATIONS, taps=()",
        "taps=()",
        ("tests/tuning/test_auto.py::test_the_copy_is_what_load_makes[False]",),
    ),
    Mutant(
        "jetspec-sees-later-rows",
        "a JetSpec head is trained with blocks whose rows see the rows after them",
        "train/dflash.py",
        "near = near if c.is_causal(layer) else jnp.ones_like(near)",
        "near = jnp.ones_like(near)",
        ("tests/train/test_dflash_training.py::test_a_shorter_block_guesses_the_same_only_if_it_is_causal[jetspec]",),
    ),
    Mutant(
        "jetspec-shift-keeps-the-last-row",
        "the last row of a shifted JetSpec block guesses a token that it was not trained for",
        "heads/dflash_layouts.py",
        'self._stated("block_size") - self._is_shifted(any(causal))',
        'self._stated("block_size")',
        ("tests/heads/test_dflash_files.py::test_sizes_are_those_of_the_tensors",),
    ),
    Mutant(
        "jetspec-read-as-dflash",
        "the file of a JetSpec head is read without causal blocks",
        "heads/dflash_layouts.py",
        'CAUSAL_KEYS = ("is_causal", "causal", "causal_head")',
        'CAUSAL_KEYS = ("is_causal", "causal")',
        ("tests/drafters/test_dflash_reference.py::test_contexts_states_logits_and_certainties[JetSpec]",),
    ),
    Mutant(
        "dflash-taps-as-z-lab-counts",
        "the taps of speculators' files are read as those of z-lab's, one layer too far",
        "heads/dflash_layouts.py",
        "first_tap=0",
        "first_tap=1",
        ("tests/heads/test_dflash_files.py::test_sizes_are_those_of_the_tensors",),
    ),
    Mutant(
        "samples-share-their-noise",
        "all samples of a prompt have the key of the first, so a group of a rollout is one text",
        "generation/rollout.py",
        "state = state._replace(key=request.key, sampling=request.sampling)",
        "state = state._replace(sampling=request.sampling)",
        (f"{ROLLOUT}::test_rows_are_those_of_generate",),
    ),
    Mutant(
        "scores-without-temperature",
        "a trainer scores a rollout under the raw logits, though it was drawn at another temperature and truncated",
        "generation/rollout.py",
        "sampled = log_prob(score, token, rest, drawn=True)",
        "sampled = raw",
        (f"{ROLLOUT}::test_log_probs_are_those_of_each_rows_law",),
    ),
    Mutant(
        "scores-of-the-next-token",
        "log-probabilities of a rollout are read one position late",
        "generation/rollout.py",
        "_aligned(features, rollout.start - 1, within.shape[1])",
        "_aligned(features, rollout.start, within.shape[1])",
        (f"{ROLLOUT}::test_log_probs_are_those_of_each_rows_law",),
    ),
    Mutant(
        "bridge-reads-the-targets-ids",
        "a draft of another vocabulary reads its drafted tokens by the target's ids",
        "drafters/model.py",
        "read_draft(level._replace(tokens=tokens), entries)",
        "read_draft(level, entries)",
        ("tests/drafters/test_bridged.py::test_the_law_is_the_drafts_on_the_common_tokens",),
    ),
    Mutant(
        "bridge-spells-its-prompt-twice",
        "a draft that was given its own prompt appends the spelling of the target's prompt, too",
        "drafters/model.py",
        "(advance.start[:, None] + steps >= state.covered[:, None])",
        "(advance.start[:, None] + steps >= 0)",
        ("tests/drafters/test_bridged.py::TestOwnPrompts",),
    ),
    Mutant(
        "bridge-pairs-names-of-bytes",
        "a letter is paired by the byte token of the same text, which no model emits",
        "text/bridge.py",
        "key=lambda i: (not self.tokenizer.is_plain(i), i)",
        "key=lambda i: i",
        ("tests/text/test_bridge.py::test_a_space_mark_is_a_space_and_a_name_of_a_byte_is_a_byte",),
    ),
    Mutant(
        "bridge-pairs-control-tokens-by-name",
        "control tokens of other roles are common if their names are (vLLM compares names)",
        "text/bridge.py",
        "if i not in self.tokenizer.special_ids]",
        "]",
        ("tests/text/test_bridge.py::test_control_tokens_are_never_compared_by_name",),
    ),
    Mutant(
        "pard-keeps-its-masks",
        "keys and values of mask tokens stay in the cache of a PARD model",
        "drafters/pard.py",
        "commit(cache, entries, None, count, ",
        "commit(cache, entries, None, jnp.where(count > 0, size, 0), ",
        ("tests/drafters/test_pard.py::test_the_rows_of_the_call_are_those_of_a_plain_pass[ragged]",),
    ),
    Mutant(
        "pard-rows-of-padding",
        "a row with little unread text takes the laws of a full window's rows",
        "drafters/pard.py",
        "rows = (jnp.maximum(count - 1, 0) + jnp.arange(depth))[:, :, None]",
        "rows = (jnp.full_like(count, depth) + jnp.arange(depth))[:, :, None]",
        ("tests/drafters/test_pard.py::test_the_rows_of_the_call_are_those_of_a_plain_pass[ragged]",),
    ),
    Mutant(
        "pard-2-masks-without-states",
        "nothing of the target's states is added to the masks of a PARD-2 model",
        "drafters/pard.py",
        "jnp.minimum(positions, last)",
        "jnp.minimum(positions, state.added.shape[1] - 1)",
        ("tests/drafters/test_pard.py::test_the_rows_of_the_call_are_those_of_a_plain_pass[PARD-2]",),
    ),
    Mutant(
        "recycling-keeps-the-first-of-equal-nodes",
        "of nodes with one token the entry that a scatter happens to write last is kept (Token Recycling)",
        "drafters/recycling.py",
        "later = jnp.triu(slot[:, :, None] == slot[:, None, :], 1).any(-1)",
        "later = jnp.tril(slot[:, :, None] == slot[:, None, :], -1).any(-1)",
        ("tests/drafters/test_recycling.py::test_a_round_replaces_the_entries_of_its_nodes",),
    ),
    Mutant(
        "recycling-writes-for-finished-rows",
        "a row that has finished goes on to learn from the nodes it is computed on",
        "drafters/recycling.py",
        "on = (seen.tokens >= 0) & running & ",
        "on = (seen.tokens >= 0) & ",
        ("tests/drafters/test_recycling.py::test_a_round_replaces_the_entries_of_its_nodes",),
    ),
    Mutant(
        "recycling-reads-another-tokens-entry",
        "what followed the token that shares a slot is drafted",
        "drafters/recycling.py",
        "hit = (jnp.take_along_axis(state.token, slot, 1) == tokens)[..., None]",
        "hit = (jnp.take_along_axis(state.token, slot, 1) >= 0)[..., None]",
        ("tests/drafters/test_recycling.py::test_another_token_in_the_slot_is_no_entry",),
    ),
    Mutant(
        "recycling-guesses-after-the-last-node",
        "second guesses are those of the law after the last token, which do not compete with it, and not beside it",
        "drafters/recycling.py",
        "jnp.maximum(advance.count - 2, 0)[:, None]",
        "jnp.maximum(advance.count - 1, 0)[:, None]",
        ("tests/drafters/test_recycling.py::test_the_root_has_the_other_likely_tokens_of_its_law",),
    ),
    Mutant(
        "recycling-drafts-a-token-twice",
        "a token that two sources name is drafted twice among siblings",
        "drafters/recycling.py",
        "first = (ids >= 0) & ~jnp.tril(same, -1).any(-1)",
        "first = ids >= 0",
        ("tests/drafters/test_recycling.py::test_any_table_gives_a_draft",),
    ),
    Mutant(
        "recycling-drafts-padding",
        "ids that no row may draw, such as those that pad a vocabulary, are drafted",
        "core/draw.py",
        "logits = process_some([one], [state], path, ids, widened(logits), self.noise.vocab)",
        "pass",
        ("tests/drafters/test_recycling.py::test_any_table_gives_a_draft",),
    ),
    Mutant(
        "lookup-copies-the-oldest",
        "of places with equal matches the oldest is copied (the first match of an n-gram look-up)",
        "drafters/_match.py",
        " + jnp.arange(tokens.size) * (match > 0)",
        "",
        ("tests/drafters/test_prompt_lookup.py::test_the_likeliest_copies_are_proposed[default-5]",),
    ),
    Mutant(
        "lookup-leaves-holes",
        "tokens that a row may not draft are proposed behind others, and make the target's call wider",
        "drafters/prompt_lookup.py",
        " & (highest > -jnp.inf)",
        "",
        ("tests/drafters/test_prompt_lookup.py::test_the_likeliest_copies_are_proposed[default-2]",),
    ),
    Mutant(
        "drafts-without-a-budget",
        "a row drafts on, however often its drafts were rejected",
        "schedules/_balance.py",
        "loss <= balance[:, None]",
        "loss < balance[:, None] + jnp.inf",
        ("tests/schedules/test_balance.py::test_hopeless_drafts_cost_no_more_than_allowed[0.96-best-width]",),
    ),
    Mutant(
        "cut-tokens-are-savings",
        "tokens that were accepted, but cut at the end of a row, count as if they had saved time",
        "decode/commit.py",
        "emitted=count,",
        "emitted=reached + 1,",
        ("tests/schedules/test_balance.py::test_the_loop_keeps_the_bound[best-width-deterministic]",),
    ),
    Mutant(
        "rows-do-not-pay-for-others",
        "a row whose draft is short pays for its own width in a call that is as wide as the longest draft",
        "schedules/best_width.py",
        "jnp.broadcast_to(nodes.max(), nodes.shape), nodes.size",
        "nodes, nodes.size",
        ("tests/schedules/test_best_width.py::test_a_round_costs_its_width[True]",),
    ),
)


def prepared(mutant: Mutant | None, folder: pathlib.Path) -> pathlib.Path:
    """A copy of what the tests need, with the mutant's line changed."""
    for part in ("jaxspec", "scripts", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    if mutant is not None:
        path = folder / "jaxspec" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.name}: its line stands {text.count(mutant.old)} times in {mutant.file}, not once"
            )
        path.write_text(text.replace(mutant.old, mutant.new))
        if path.suffix != ".py":
            build(folder)
    return folder


def build(folder: pathlib.Path, flags: str = "") -> None:
    """Builds the kernels of a copy of the package."""
    for old in (folder / "jaxspec/kernels").glob("_kernels*"):
        old.unlink()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = os.environ | {"CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not list((folder / "jaxspec/kernels").glob("_kernels*")):
        raise SystemExit(f"the kernels cannot be built:\n{done.stdout}{done.stderr}")


def has_kernels(processor: str) -> bool:
    """Returns whether this processor can run the kernels for a kind of processors."""
    program = "import sys; from jaxspec.kernels import library; sys.exit(not library.kernels_available())"
    environment = os.environ | {VARIABLE: processor, "PYTHONPATH": str(ROOT)}
    return not subprocess.run([sys.executable, "-c", program], env=environment).returncode


def tested(
    tests: tuple[str, ...],
    folder: pathlib.Path,
    seed: int,
    limit: int | None,
    marked: str,
    kernels: str | None,
) -> tuple[int, list[str], str]:
    """pytest's exit status, the tests that failed by an assertion, and what was printed; `limit` is in seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--seed={seed}", "-m", marked]
    command += tests
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}
    environment |= {} if kernels is None else {VARIABLE: kernels}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)
    failed = re.findall(r"^FAILED (.+?)(?: - (?:AssertionError|assert)\b.*)$", done.stdout, re.MULTILINE)
    return done.returncode, failed, done.stdout + done.stderr


def kill(mutant: Mutant) -> tuple[Mutant, list[str], float, str]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        prepared(mutant, pathlib.Path(folder))
        for marked in (USUAL, SLOW):
            _, failed, printed = tested(mutant.tests, pathlib.Path(folder), 0, TIMEOUT, marked, mutant.kernels)
            if failed:
                break
    return mutant, failed, time.perf_counter() - start, printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--clean", type=int, metavar="SEEDS", help="run the tests unchanged, with so many seeds")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:  # what no mutant touches is compiled once
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compiled)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        return run(arguments, parser)


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    chosen = [m for m in MUTANTS if not arguments.names or m.name in arguments.names]
    if unknown := set(arguments.names) - {m.name for m in MUTANTS}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    if arguments.clean:
        tests = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        red = 0
        with tempfile.TemporaryDirectory() as folder:
            prepared(None, pathlib.Path(folder))
            for seed in range(arguments.clean):
                status, _, printed = tested(tests, pathlib.Path(folder), seed, None, USUAL, None)  # all of them at once
                red += status != 0
                print(f"seed {seed}: " + ("green" if status == 0 else f"RED\n{printed}"), flush=True)
        return 1 if red else 0
    missing = {kind for kind in {m.kernels for m in chosen if m.kernels} if not has_kernels(kind)}
    for mutant in [m for m in chosen if m.kernels in missing]:
        print(f"{mutant.name}: not tried, because this processor cannot run the kernels for {mutant.kernels}")
        chosen.remove(mutant)
    survivors = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, failed, seconds, printed in pool.map(kill, chosen):
            survivors += not failed
            how = f"killed by {failed[0]}" if failed else "SURVIVED"
            print(f"{mutant.name}: {how} ({seconds:.0f} s)\n    {mutant.bug}", flush=True)
            if not failed:
                print(printed[-2000:], flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    if arguments.record:
        values = {"bugs": len(chosen), "found": len(chosen) - survivors}
        print(f"written: {write_record(arguments.record, 'mutants', sys.argv, values)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
