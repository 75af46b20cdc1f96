"""The noise of a watermark: a function of a secret and of the last tokens, which decoder and detector compute."""

from typing import Any

from jaxtyping import Array, Int, UInt32

from jaxspec.core import threefry
from jaxspec.core.checks import index
from jaxspec.core.sizes import MAX_SEED
from jaxspec.errors import InvalidConfig, shown

_TAG = 0x776D6B


def secret_words(secret: Any) -> tuple[int, int]:
    """Returns the two words of a secret.

    Raises:
        InvalidConfig: the secret is not a whole number from 0 to 2^64 - 1.
    """
    number = index(secret)
    if number is None or not 0 <= number <= MAX_SEED:
        raise InvalidConfig(f"the secret of a watermark must be a whole number from 0 to 2^64 - 1, got {shown(secret)}")
    return number >> 32, number & 0xFFFFFFFF


def noise_keys(
    secret: UInt32[Array, "*b 2"], last: Int[Array, "*b L"], times: Int[Array, "*b"]
) -> UInt32[Array, "*b 2"]:
    """Returns the data of the keys of noise, for `jaxspec.core.threefry.gumbel`.

    Args:
        secret: the words of the secrets.
        last: the tokens before the new token.
        times: how often the text had these tokens before a new token already.
    """
    return threefry.fold_in(secret, _TAG, *(last[..., i] for i in range(last.shape[-1])), times)
