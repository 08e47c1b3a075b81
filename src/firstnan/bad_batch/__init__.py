"""The first batch that breaks a step, or the first step from which a training went wrong."""

from firstnan.bad_batch.door import find_bad_batch
from firstnan.bad_batch.found import BadBatch, BatchSearch

__all__ = ["BadBatch", "BatchSearch", "find_bad_batch"]
