"""Who owns slots and cursors: layout and bytes, the slot pool, snapshots."""

from replayssm.state.layout import LayerBytes, LayerSpec, LayerState, StateDtypes, layer_bytes
from replayssm.state.pool import ReplayPool, SlotError

__all__ = ["LayerBytes", "LayerSpec", "LayerState", "ReplayPool", "SlotError", "StateDtypes", "layer_bytes"]
