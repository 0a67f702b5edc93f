"""From a model and a batch to one captured graph of forward, loss and backward."""

from mirrorc.capture.autograd import AutogradFrontEnd
from mirrorc.capture.dynamo import DynamoFrontEnd
from mirrorc.capture.front_ends import register_front_end
from mirrorc.capture.trace import TraceFrontEnd

register_front_end(DynamoFrontEnd(), is_rung=True)
register_front_end(AutogradFrontEnd(), is_rung=True)
register_front_end(TraceFrontEnd())
