"""Loaded by every Python of a test with the stub of libibverbs: its devices are found below STUB_IBV_ROOT."""

import functools
import os

if "STUB_IBV_ROOT" in os.environ:
    from hdma import nics

    nics.card = functools.partial(nics.card, root=os.environ["STUB_IBV_ROOT"])
