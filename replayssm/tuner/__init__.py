"""`replayssm tune`: measures on this machine's GPU what :mod:`replayssm.tuned` keeps."""
