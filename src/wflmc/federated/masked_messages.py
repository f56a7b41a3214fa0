"""What the server refuses of the replies in secure aggregation, before Flower's workflow sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.app import ConfigRecord, Message
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from wflmc.federated.lattice import MODULUS
from wflmc.federated.messages import HEADER, RejectedError, short

SECRET = 4096
"""Bytes that a key, a share or an encrypted share may take; Flower's are below 1000."""


def read_masked(reply: Message, asked: dict[str, Any], shape: tuple[int, int]) -> None:
    """RejectedError for whatever is not a proper reply to a stage of the protocol.

    Args:
        asked: the configs of the request.
        shape: of a message, [chain, m].
    """
    if reply.has_error():
        raise RejectedError(f"error {reply.error.code}: {short(reply.error.reason)}")
    configs = reply.content.get(RECORD_KEY_CONFIGS)
    if not isinstance(configs, ConfigRecord):
        raise RejectedError("malformed: no record of the protocol")
    stage, found = asked[Key.STAGE], dict(configs)
    if stage == Stage.SETUP:
        _keys(found)
    elif stage == Stage.SHARE_KEYS:
        others = {int(name) for name in asked if name != Key.STAGE} - {reply.metadata.src_node_id}
        if sorted(_list(found, Key.DESTINATION_LIST, int)) != sorted(others):
            raise RejectedError("malformed: shares for others than was asked")
        _secrets(found, Key.CIPHERTEXT_LIST, len(others))
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        _vector(reply, found, shape)
    else:
        nodes = [*asked[Key.ACTIVE_NODE_ID_LIST], *asked[Key.DEAD_NODE_ID_LIST]]
        if _list(found, Key.NODE_ID_LIST, int) != nodes:
            raise RejectedError("malformed: shares of others than was asked")
        _secrets(found, Key.SHARE_LIST, len(nodes))


def _keys(found: dict[str, Any]) -> None:
    for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
        key = found.get(name)
        if not isinstance(key, bytes) or len(key) > SECRET:
            raise RejectedError("malformed: no public key")
        try:
            bytes_to_public_key(key)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise RejectedError("malformed: no public key") from None
    if found[Key.PUBLIC_KEY_1] == found[Key.PUBLIC_KEY_2]:
        raise RejectedError("malformed: the same public key twice")


def _vector(reply: Message, found: dict[str, Any], shape: tuple[int, int]) -> None:
    parts = _list(found, Key.MASKED_PARAMETERS, bytes)
    if len(parts) != 2:
        raise RejectedError("malformed: not a weight and a vector")
    for part, wanted in zip(parts, ((1,), shape), strict=True):
        if len(part) > 8 * int(np.prod(wanted)) + HEADER:
            raise RejectedError(f"oversized: {len(part)} bytes for {8 * int(np.prod(wanted))}")
        try:
            array = bytes_to_ndarray(part)
        except Exception as error:  # bytes from elsewhere fail in whatever way they like
            raise RejectedError(f"malformed: no array ({type(error).__name__})") from None
        if array.shape != wanted or array.dtype != np.int64:
            raise RejectedError(f"malformed: {array.dtype} of shape {array.shape}, not int64 of {wanted}")
        if array.min() < 0 or array.max() >= MODULUS:
            raise RejectedError("malformed: integers beyond the modulus")
    try:  # as the workflow will
        weight = recorddict_compat.recorddict_to_fitres(reply.content, keep_input=True).num_examples
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RejectedError("malformed: not the records of a result") from None
    if weight != 1 or any(len(record) for record in reply.content.array_records.values()):
        raise RejectedError("malformed: more than one masked message")


def _list(found: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = found.get(name)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise RejectedError(f"malformed: {name} is no list of {kind.__name__}")
    return values


def _secrets(found: dict[str, Any], name: str, length: int) -> None:
    values = _list(found, name, bytes)
    if len(values) != length or not all(20 <= len(value) <= SECRET for value in values):
        raise RejectedError(f"malformed: {len(values)} secrets where {length} were asked for")
