"""Settings that were measured on a GPU: how a layer's decode step is cut into blocks, and which ring suits it.

`replayssm tune` measures them (:mod:`replayssm.tuner`). Files for known GPUs ship with the package; what the user has
measured lies in the cache folder and takes their place, layer by layer. Cuts change no bit of any result.
"""

from replayssm.tuned.settings import Cut, Ring, Shape, Tuned, TunedFileError, TunedLayer, parse, unparse
from replayssm.tuned.store import forget, layer_of, own_file, read, save, shipped_file, sources

__all__ = [
    "Cut",
    "Ring",
    "Shape",
    "Tuned",
    "TunedFileError",
    "TunedLayer",
    "forget",
    "layer_of",
    "own_file",
    "parse",
    "read",
    "save",
    "shipped_file",
    "sources",
    "unparse",
]
