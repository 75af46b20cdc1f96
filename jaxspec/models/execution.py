"""How a network runs: settings that change its speed and the rounding of sums, but not what is computed."""

import dataclasses

from jaxspec.backend.layout import default_platform
from jaxspec.core.checks import one_of
from jaxspec.errors import InvalidConfig
from jaxspec.kernels.library import kernels_available

ATTENTION_KINDS = ("xla", "pallas")
PRODUCT_KINDS = ("xla", "pallas")
PALLAS_PLATFORMS = ("gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the operations of a `TransformerLM` and of its draft heads run.

    Attributes:
        kernels: whether to use the CPU kernels for attention, norms and heads in programs for a CPU; packed matrices
            (`jaxspec.models.packed`) always use them.
        shards: the number of devices that share a layer, by which the columns of fused matrices are grouped; see
            `jaxspec.models.columns.group_by_shard`.
        attention: "xla" for XLA's own operations, or "pallas" for a kernel on a TPU or GPU; see
            `jaxspec.models.attention_pallas`.
        platform: the platform of the devices, such as "cpu", "gpu" or "tpu"; None for JAX's default device. A cache
            stores bfloat16 differently on a GPU, and attention reads the cache in larger blocks there.
        products: "xla" for XLA's own operations or the CPU kernels around attention, or "pallas" for kernels on a
            GPU or TPU, in which the bits of a row do not depend on the other rows; see `jaxspec.models.layer_calls`. It
            needs `attention="pallas"` or `exact`. No real GPU or TPU has run these kernels yet.
        exact: whether the bits of a row must not depend on how many rows and tokens a call has. `resolve` then chooses
            the forms of operations for which this holds. `jaxspec.models.exact.resolve_exact` chooses `products`, and
            refuses what the promise cannot hold for.

    Raises:
        InvalidConfig: there is no attention or there are no products of this name, or several devices would share a
            kernel that is not split over them.
    """

    kernels: bool = False
    shards: int = 1
    attention: str = "xla"
    platform: str | None = None
    products: str = "xla"
    exact: bool = False

    def __post_init__(self) -> None:
        one_of("attention", self.attention, ATTENTION_KINDS)
        in_pallas = self.exact and self.products == "pallas"
        if self.attention == "pallas" and self.shards > 1 and not in_pallas:
            raise InvalidConfig(
                f"attention='pallas' is for layers on one device, got layers split over {self.shards}; use 'xla'"
            )
        one_of("products", self.products, PRODUCT_KINDS)
        if self.products == "pallas" and self.attention != "pallas" and not self.exact:
            raise InvalidConfig(f"products='pallas' needs attention='pallas', got {self.attention!r}")
        if self.exact and self.shards > 1 and not in_pallas:
            raise InvalidConfig(
                f"exact=True splits layers over devices only with products in Pallas, got {self.shards} devices and "
                f"products={self.products!r}; use a mesh whose axis 'model' has one device"
            )

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are GPUs, where a few large operations are faster than many small ones."""
        return self.platform == "gpu"

    def resolve(self) -> "Execution":
        """Returns the record with a platform, without kernels that are not available, and with exact forms if `exact`.

        No other code chooses exact forms by platform: a platform with a new form needs a change only here.
        """
        platform = default_platform() if self.platform is None else self.platform
        has_kernels = platform in PALLAS_PLATFORMS
        attention = "pallas" if self.exact and has_kernels else self.attention
        products = "xla" if self.exact and not has_kernels else self.products
        kernels = self.kernels and kernels_available()
        return dataclasses.replace(self, kernels=kernels, platform=platform, attention=attention, products=products)

    def of_head(self) -> "Execution":
        """Returns how draft heads run beside this network: on the same platform, each layer whole, by XLA.

        What heads propose does not change the bits of a text, so they are not exact.
        """
        return dataclasses.replace(self, shards=1, attention="xla", products="xla", exact=False)
