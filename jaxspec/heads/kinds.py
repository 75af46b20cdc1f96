"""The kinds of draft heads. Nothing here imports JAX."""

from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_config import EagleConfig

HeadSizes = HeadsConfig | EagleConfig | DFlashConfig
