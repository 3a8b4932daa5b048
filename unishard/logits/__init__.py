"""The loss of a language model over a few tokens at a time: the logits of all tokens are never there at once.

Neither the engine nor the model knows of it. While a model of transformers runs with labels, calling its head does not
compute, but remembers what it was called with; the head runs where the model computes cross entropy::

    model(labels=...)        ── forward.py ──────────▶ a stand-in takes the place of the head
    logits = head(hidden)    ── deferred_logits.py ──▶ the hidden states, in place of logits
    logits / scale, tanh ... ── row_operations.py ───▶ kept, to be done to each chunk
    cross_entropy(logits)    ── chunks.py ───────────▶ head and loss of each chunk, once more in backward
    the head's hooks         ── one_call.py ─────────▶ run once, so that an engine gathers its weights once
"""

from __future__ import annotations
