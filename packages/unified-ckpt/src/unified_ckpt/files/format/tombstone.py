"""What stands in a manifest's place in a store where there is no checkpoint, and must not be one.

A save that was killed may have sent its manifest, which a slow network or store can still bring,
however late. Who deletes that save's files writes a tombstone first: a manifest is only ever
written in the place of the object that was there when its save began (or of none), so what comes
later is refused. Each tombstone is another one.

    store.swap(key, make_tombstone(), old=None)
"""

import re
import secrets

_TOMBSTONE = re.compile(rb'{"format":"unified-ckpt-tombstone","token":"[0-9a-f]{32}"}\n\Z')


def make_tombstone() -> bytes:
    """Return one that differs from all others."""
    return b'{"format":"unified-ckpt-tombstone","token":"%s"}\n' % secrets.token_hex(16).encode()


def is_tombstone(raw: bytes) -> bool:
    """Whether the bytes of a manifest's object are none of a manifest."""
    return _TOMBSTONE.match(raw) is not None
