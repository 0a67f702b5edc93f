"""What all tests share."""

from __future__ import annotations

import logging

logging.getLogger("torch.__trace").propagate = False  # its thousands of records would drown a failure's report
