"""What all tests share, in one process or in several.

The real weights are fetched once (several processes may do so at once); without them their tests are skipped, and the
end of the run says so.
"""

import gc
import importlib.util
import os

import jax
import pytest

from helpers import shapes

shapes.execute()  # before anything imports the package

import jaxspec  # noqa: E402
from helpers import compiling, costs  # noqa: E402
from jaxspec.checkpoints import presets  # noqa: E402
from jaxspec.decode.session import clear_executables  # noqa: E402
from jaxspec.errors import FetchError  # noqa: E402
from jaxspec.generation import drafting  # noqa: E402

if importlib.util.find_spec("libtpu"):  # only one process may open it: the one that compiles for TPUs
    jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the suite's programs are not for the user's cache
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # of the processes that tests start
    jax.config.update("jax_enable_compilation_cache", False)

# A tenth of the suite's time would go to the collector, which finds little while a program is traced, and to writing
# the lines of Python into every operation of it.
gc.set_threshold(200_000, 20, 50)
jax.config.update("jax_traceback_in_locations_limit", 0)

pytest_plugins = ["helpers.durations", "helpers.tiers"]

OPTIMISED = {"test_smollm2", "test_identity", "test_gtest", "test_sampling", "test_products_gpu"}
"""Files whose claims are of machine code as users get it, or that run long; the rest compiles in half the time."""

MISSING = "THE REAL WEIGHTS ARE MISSING"


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the tests that draw their cases: any must be green")


@pytest.fixture(scope="session")
def seed(request) -> int:
    """Of the random cases; 0 unless `--seed` says otherwise."""
    return request.config.getoption("--seed")


@pytest.fixture(autouse=True, scope="session")
def _costs_of_one_processor():
    """Schedules choose how much is drafted by a cost of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "token_cost", lambda _: costs.COST)
        yield


@pytest.fixture(autouse=True, scope="module")
def _executables_of_a_module(request):
    """How they are compiled; and their end: the whole suite's need more memory maps than a process may have."""
    optimised = request.path.stem in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", not optimised)
    with pytest.MonkeyPatch.context() as patch:
        if optimised:
            compiled = jax.stages.Lowered.compile

            def compile_as_users_do(self, compiler_options=None):
                return compiled(self, compiling.AS_USERS_DO | (compiler_options or {}))

            patch.setattr(jax.stages.Lowered, "compile", compile_as_users_do)
        yield
    clear_executables()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def smollm2_path():
    """The path of SmolLM2-135M-Instruct's weights."""
    try:
        return presets.fetch_preset("smollm2-135m-instruct")
    except FetchError as error:
        pytest.skip(f"{MISSING}: no test of SmolLM2 ran. {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """SmolLM2-135M-Instruct in float32."""
    return jaxspec.load(smollm2_path)


def pytest_terminal_summary(terminalreporter):
    """Says in red what was skipped for want of the weights, so that nobody takes the run for a full one."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()) if report.longrepr]
    if reason := next((reason for reason in reasons if MISSING in reason), None):
        terminalreporter.section("THE TESTS OF THE REAL WEIGHTS DID NOT RUN", sep="!", red=True, bold=True)
        terminalreporter.line("This run says nothing about SmolLM2. Its weights could not be fetched:")
        terminalreporter.line(reason.partition(" ran. ")[2])
