from ranktest.fixtures import one_thread as one_thread
from ranktest.fixtures import seed as seed
