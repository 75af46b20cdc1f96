"""The order of the rows: shuffled batches of row numbers, whose position can be saved and restored."""

from typing import Any

from jaxspec.errors import MissingPackage
from jaxspec.train.settings import TrainSettings


def need_grain() -> Any:
    """Imports grain.

    Raises:
        MissingPackage: it cannot be imported.
    """
    try:
        import grain
    except ImportError as error:
        raise MissingPackage(
            f"training needs the package grain, which cannot be imported here ({error}); run `pip install grain`"
        ) from None
    return grain


def make_order(rows: int, settings: TrainSettings) -> Any:
    """Returns an endless iterator over batches of row numbers, shuffled in every epoch.

    Its position is read by `get_state` and set by `set_state`.
    """
    source = need_grain().MapDataset.source(range(rows)).seed(settings.seed).shuffle().repeat()
    return iter(source.batch(settings.batch, drop_remainder=True).to_iter_dataset())
