"""Captures forward, loss and backward of a model and a batch as one graph."""

from mirrorc.capture.dynamo.dynamo_front_end import DynamoFrontEnd
from mirrorc.capture.eager.autograd_front_end import AutogradFrontEnd
from mirrorc.capture.front_ends.front_end import register_front_end

register_front_end(DynamoFrontEnd(), is_rung=True)
register_front_end(AutogradFrontEnd(), is_rung=True)
