"""A device's side of secure aggregation: what it checks before it takes part in Flower's SecAgg+.

Flower's mod keeps the order of the four stages (keys, shares of secrets, masked message, shares for unmasking), gives
out shares once only, and refuses when it is told of fewer neighbours than the threshold. It believes the server all
the rest. Checked here, in front of it, by the device's own terms:

- the threshold is at least the number of senders whose noise adds up to N0, and more than half of all shares: a server
  that tells some devices that another has sent and some that it has not gets too few shares of one secret or the
  other;
- every sender has a share, lists name every device once, and only devices of this exchange; nobody is said both to
  have sent and not to have sent, and this device is among those who have;
- integers are fine enough, and the range wide enough, for the noise of the sum to be what the terms say (`lattice`);
- a request is answered once, and never without a mask (`Device.answer`).

What no device can check is whose keys the server hands it: see the documentation of `aggregation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.compat.common import recorddict_compat

from wflmc.errors import InputError
from wflmc.federated.device import Device
from wflmc.federated.lattice import MODULUS, Lattice
from wflmc.federated.messages import about, read_request, told_briefly
from wflmc.federated.terms import Terms


def mask(app: ClientApp, find: Callable[[Context], Device]) -> None:
    """Let an app of devices answer the four messages of secure aggregation too.

    Args:
        find: the device of a context.
    """

    def guard(message: Message, context: Context, proceed: Callable[[Message, Context], Message]) -> Message:
        with told_briefly():
            terms = find(context).terms
            if not terms.masked:
                raise InputError("request", "for a masked message", "for one without: its terms say masked = False")
            configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
            state = context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord())
            _refuse_unsafe(dict(configs), dict(state), terms, context.node_id)
            return proceed(message, context)

    @app.train(mods=[guard, secaggplus_mod])
    def masked(message: Message, context: Context) -> Message:
        """What is still in the clear here is masked by Flower's mod before it leaves."""
        device = find(context)
        state: Any = context.state.config_records[RECORD_KEY_STATE]
        ask, nonce = read_request(message.content, device.terms.run)
        Lattice(state["clipping_range"], state["target_range"]).refuse_beyond(device.terms, ask.precoder)
        # In float32 the rounding to integers would not be fine enough to be at random.
        signal = device.answer(ask, masked=True).astype(np.float64)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([signal]), 1, {})
        content = recorddict_compat.fitres_to_recorddict(result, keep_input=False)
        content["about"] = about(ask, device.terms.run, nonce)
        return Message(content, reply_to=message)


def _refuse_unsafe(configs: dict[str, Any], state: dict[str, Any], terms: Terms, own: int) -> None:
    """InputError for what a server that keeps to the protocol does not ask."""
    stage = configs.pop(Key.STAGE, None)
    if stage == Stage.SETUP:
        _check_setup(configs, terms)
    elif stage == Stage.SHARE_KEYS:
        nodes = [int(name) for name in configs]
        few = max(terms.fewest, int(state.get("threshold", 0)))
        _check_nodes("neighbours", nodes, set(nodes), few, own)
        if len(nodes) > state.get("sample_num", 0):
            raise InputError("neighbours", len(nodes), f"at most {state.get('sample_num', 0)}, as in the setup")
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        known = set(state.get("public_keys_dict:K", ()))
        _check_nodes("senders", [own, *configs.get(Key.SOURCE_LIST, ())], known, terms.fewest, own)
    elif stage == Stage.UNMASK:
        known = set(state.get("rd_seed_share_dict:K", ()))
        active, dead = configs.get(Key.ACTIVE_NODE_ID_LIST, []), configs.get(Key.DEAD_NODE_ID_LIST, [])
        _check_nodes("senders", active, known, max(terms.fewest, int(state.get("threshold", 0))), own)
        _check_nodes("senders and dropped devices", [*active, *dead], known, 0, own)


def _check_setup(configs: dict[str, Any], terms: Terms) -> None:
    wanted = {Key.SAMPLE_NUMBER: int, Key.SHARE_NUMBER: int, Key.THRESHOLD: int, Key.CLIPPING_RANGE: float}
    wanted |= {Key.TARGET_RANGE: int, Key.MOD_RANGE: int, Key.MAX_WEIGHT: float}
    for name, kind in wanted.items():
        if type(configs.get(name)) is not kind:
            raise InputError(name, configs.get(name), f"of type {kind.__name__}")
    senders, shares, threshold = (configs[name] for name in (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER, Key.THRESHOLD))
    if shares != senders:
        raise InputError(Key.SHARE_NUMBER, shares, f"{senders}, one for every sender")
    if not max(terms.fewest, shares // 2 + 1, 2) <= threshold <= shares:
        least = max(terms.fewest, shares // 2 + 1, 2)
        raise InputError(Key.THRESHOLD, threshold, f"between {least} and {shares}: no sum of fewer may be learnt")
    if configs[Key.MOD_RANGE] != MODULUS:
        raise InputError(Key.MOD_RANGE, configs[Key.MOD_RANGE], f"{MODULUS}")
    if configs[Key.MAX_WEIGHT] != 1.0:
        raise InputError(Key.MAX_WEIGHT, configs[Key.MAX_WEIGHT], "1.0: every message counts once")
    Lattice(configs[Key.CLIPPING_RANGE], configs[Key.TARGET_RANGE]).refuse_coarse(terms.share, senders)


def _check_nodes(what: str, nodes: list[int], known: set[int], fewest: int, own: int) -> None:
    """InputError unless nodes are at least so many, each named once, all known, and this device one of them."""
    if len(set(nodes)) != len(nodes) or own not in nodes or not set(nodes) <= known:
        raise InputError(what, nodes, "devices of this exchange, each once, and this one among them")
    if len(nodes) < fewest:
        raise InputError(what, f"{len(nodes)} devices", f"at least {fewest}: no sum of fewer may be learnt")
