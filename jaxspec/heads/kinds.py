"""The kinds of draft heads, by the drafter that they are for. Nothing here imports JAX."""

from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_config import EagleConfig

HeadSizes = HeadsConfig | EagleConfig | DFlashConfig
KINDS: dict[str, type[HeadSizes]] = {kind.drafter: kind for kind in (HeadsConfig, EagleConfig, DFlashConfig)}
