"""A rank of `tests/communication/test_collectives.py`: asks the collectives of its strategy."""

import tfparallel
from tests.communication.collective_claims import all_differences

found = all_differences(tfparallel.HorovodStrategy().extended._collectives, in_function=True)
print("\n".join(found) or "nothing differs")
