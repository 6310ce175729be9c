"""Many small tensors become few large ones: a collective has a price for each call."""

from collections.abc import Hashable, Sequence

_SMALL = 64  # tensors of at most so small a part of a bucket wait for one another

# Large enough to reach the network's bandwidth, small enough that the first is under way while
# later gradients are being computed.
SENT_BUCKET_BYTES = 8 << 20
HOROVOD_BUCKET_BYTES = 16 << 20  # of which its own fusion makes one collective
COMPRESSED_BUCKET_BYTES = 16 << 20  # before compression: of that less is sent


def plan_buckets(
    sizes_bytes: Sequence[int | None], kinds: Sequence[Hashable], bucket_bytes: int
) -> list[list[int]]:
    """Groups neighbours of one kind until a bucket is full.

    Small tensors among large ones, such as biases, are neighbours of one another: between two
    kernels that fill a bucket each, a bias would be a collective of its own.

    Args:
        sizes_bytes: of each tensor, in the order in which they become ready; None is not known.
        kinds: only tensors of equal kinds (dtypes) share a bucket.
        bucket_bytes: a bucket is closed before it would grow beyond this. A tensor that is larger,
            or whose size is not known, is a bucket of its own.

    Returns:
        Buckets of indices. Each index is in one; within a bucket they are in order. Buckets are in
        the order in which they become ready: when their last tensor does.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for i, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        group = (kind, size is not None and size * _SMALL <= bucket_bytes)
        bucket, filled = open_buckets.get(group, ([], 0))
        if size is None or not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[group] = (bucket, bucket_bytes if size is None else filled + size)
    return sorted(buckets, key=lambda bucket: bucket[-1])
