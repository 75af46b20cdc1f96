"""The model "jaxspec" of EleutherAI's lm-evaluation-harness: any drafter in the harness's tasks.

Importing this module registers the model. `python -m jaxspec.evaluation` is the harness's own command line with it. The
harness is the package `lm-eval` (the extra `lm-eval`), which jaxspec does not need otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxspec.api import generate
from jaxspec.checkpoints.load import load
from jaxspec.core import checks
from jaxspec.core.sampling import Sampling
from jaxspec.errors import InvalidConfig, MissingPackage
from jaxspec.evaluation.scoring import Continuation, score
from jaxspec.processors.penalties import RepetitionPenalty
from jaxspec.registry import DRAFTER

try:
    from lm_eval import utils  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingPackage(
        f"the model of lm-evaluation-harness needs lm-eval>=0.4.9, which cannot be imported here ({error}); install it "
        "with `pip install 'lm-eval>=0.4.9'`"
    ) from None

IGNORED = {"until", "max_gen_toks", "do_sample", "temperature"}
"""Arguments of a task's generation that are read by name, and not as a field of `Sampling`."""
SAMPLING = {"top_p": float, "top_k": int, "min_p": float}


@register_model("jaxspec")
class HarnessModel(TemplateLM):
    """A target with a drafter, as a model of lm-evaluation-harness."""

    def __init__(
        self,
        target: str,
        *,
        drafter: str = DRAFTER,
        draft: str | None = None,
        heads: str | None = None,
        tree: int | None = None,
        rule: str = "coupled",
        drafting: str | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        """Loads the models. The arguments are those of `--model_args`, `--batch_size` and `--device`.

        Args:
            target: preset, path or repository of the target; see `jaxspec.load`.
            drafter, heads, tree, rule, drafting: see `jaxspec.generate`; a tree is a number, the length of a chain.
            draft: preset, path or repository of the draft model.
            dtype: dtype of the matrices of target and draft model.
            max_length: the largest number of tokens of context and continuation; None for the model's own.
            max_gen_toks: the number of new tokens of tasks that do not state one.
            seed: seed of the random keys of tasks that draw samples.
            batch_size: the largest number of texts at once.
            max_batch_size: not used; the harness passes it.
            device: must be None, "cpu" or what the environment variable JAX_PLATFORMS selects; JAX chooses devices.

        Raises:
            JaxspecError: an argument is invalid, or a model cannot be loaded.
        """
        super().__init__()
        if batch_size == "auto":
            batch_size = 8
        self.batch_size = checks.whole("batch_size", int(batch_size))
        self.model = load(target, dtype=dtype)
        self.max_length = checks.whole("max_length", max_length or self.model.lm.context, 2)
        self.max_gen_toks = checks.whole("max_gen_toks", max_gen_toks)
        self.seed = checks.whole("seed", seed, 0)
        options: dict[str, Any] = {"rule": rule, "heads": heads}
        options |= {"draft": None if draft is None else load(draft, dtype=dtype)}
        options |= {"drafter": drafter, "tree": tree} if drafting is None else {"drafting": drafting}
        self.options = options

    # Text and tokens.

    @property
    def eot_token_id(self) -> int:
        return self.model.stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos = self.model.tokenizer.bos_id if self.model.tokenizer is not None else None
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.model.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the source of the chat template, which the harness writes into its results."""
        template = self.model.chat_template
        return "" if not chat_template or template is None else template.source or ""

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise InvalidConfig(
                "add_generation_prompt=False is not supported: chats end with the beginning of a reply; leave out "
                "--gen_prefix and answers that are begun"
            )
        return self.model.render_chat(chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.encode(string, begins=add_special_tokens is not False)

    # What the harness asks for.

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns the sum of log-probabilities of each continuation, and whether it is the greedy one.

        A context is cut at its beginning if context and continuation do not fit into the model.
        """
        continuations = []
        for _names, context, following in requests:
            tokens = [*context, *following][-self.max_length - 1 :]  # the last one is not read
            continuations.append(Continuation(tokens, max(len(tokens) - len(following), 1)))
        results = [(each.logprob, each.greedy) for each in score(self.model, continuations, self.batch_size)]
        for (names, *_rest), result in zip(requests, results):
            if names is not None:
                self.cache_hook.add_partial("loglikelihood", names, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of whole texts, each in windows of the model's length."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            (string,) = request.args
            parts = utils.get_rolling_token_windows(
                token_list=self.model.encode(string, begins=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            new = [(None, *utils.make_disjoint_window(part)) for part in parts]
            windows += new
            owners += [index] * len(new)
        totals = [0.0] * len(requests)
        for index, (logprob, _greedy) in zip(owners, self._loglikelihood_tokens(windows)):
            totals[index] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the texts that follow the contexts, cut before the first stop string."""
        texts: list[str] = [""] * len(requests)
        for arguments, rows in _group(request.args[1] for request in requests):
            contexts = [requests[row].args[0] for row in rows]
            for row, text in zip(rows, self._generate(contexts, arguments)):
                texts[row] = text
                self.cache_hook.add_partial("generate_until", requests[row].args, text)
        return texts

    def _generate(self, contexts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        given = normalize_gen_kwargs(dict(arguments), self.max_gen_toks)
        new = given["max_gen_toks"]
        if new >= self.max_length:
            raise InvalidConfig(f"the task asks for {new} new tokens; max_length is {self.max_length}")
        prompts = [self.tok_encode(context)[new - self.max_length :] or [self.prefix_token_id] for context in contexts]
        sampling = _sampling(given)
        output = generate(
            self.model,
            prompts,
            key=None if sampling.temperature == 0 else jax.random.key(self.seed),
            sampling=sampling,
            max_new_tokens=new,
            stop=[string for string in given["until"] if string],
            batch=self.batch_size,
            verbose=False,
            **self.options,
        )
        return [text.text or "" for text in output]


def _sampling(given: Mapping[str, Any]) -> Sampling:
    """Returns the sampling settings of a task.

    Raises:
        InvalidConfig: the task sets something that jaxspec does not have.
    """
    rest = {name: value for name, value in given.items() if name not in IGNORED and value is not None}
    penalty = rest.pop("repetition_penalty", 1.0)
    if unknown := rest.keys() - SAMPLING.keys():
        raise InvalidConfig(
            f"the task sets {', '.join(sorted(unknown))} for its texts, which jaxspec does not know; known are "
            f"{', '.join(sorted(IGNORED | SAMPLING.keys() | {'repetition_penalty'}))}"
        )
    processors = [] if penalty == 1 else [RepetitionPenalty(penalty)]
    if not given["do_sample"]:
        return Sampling(processors=processors)
    settings = {name: SAMPLING[name](value) for name, value in rest.items()}
    return Sampling(temperature=given["temperature"], processors=processors, **settings)


def _group(arguments: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Returns each of the different arguments, with the numbers of the requests that have it."""
    groups: list[tuple[Mapping[str, Any], list[int]]] = []
    for row, argument in enumerate(arguments):
        rows = next((rows for known, rows in groups if known == argument), None)
        if rows is None:
            groups.append((argument, [row]))
        else:
            rows.append(row)
    return groups
