"""Settings for the whole suite: how property tests choose their examples. Nothing here touches time."""

import os

from hypothesis import settings

# No deadlines: no test asserts on elapsed time. CI takes the same examples every time, so that it fails only for a
# reason in the change; elsewhere each run looks at new ones.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
