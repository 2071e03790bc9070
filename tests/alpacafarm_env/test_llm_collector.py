"""The garbage collector while a client is open."""

import gc

from llm_asks import ask
from wire_server import WireServer, ok


def frozen_while_asking():
    """How many objects full collections pass over while a request is answered."""
    counts = []
    with WireServer(lambda seen, number: counts.append(gc.get_freeze_count()) or ok()) as server:
        ask(server)
    return counts[0]


def test_full_collections_pass_over_what_was_there_until_the_client_closes():
    assert gc.get_freeze_count() == 0
    existing = len(gc.get_objects())
    assert frozen_while_asking() > 0.9 * existing  # some may be freed on the way
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_so():
    gc.freeze()
    try:
        mine = gc.get_freeze_count()
        # Some of it may be freed on the way; to freeze again would add all that was made since.
        assert 0 < frozen_while_asking() <= mine
        assert 0 < gc.get_freeze_count() <= mine
    finally:
        gc.unfreeze()
