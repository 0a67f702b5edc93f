"""What a CUDA graph cannot capture of an optimizer is said of the hyperparameter that holds it."""

import pytest
import torch

from mirrorc.ir.variables import Role, UpdateRule, Variable
from mirrorc.user.optimizer_groups import OptimizerGroups, check_capturable


def test_a_tensor_in_a_pair_of_hyperparameters_is_not_said_to_be_the_pair() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    groups = OptimizerGroups([torch.optim.AdamW([weight], fused=True)])
    rule = UpdateRule("AdamW group 0", 0)
    variables = {"weight": Variable("weight", (3,), (1,), torch.float32, Role.PARAMETER, update=rule)}
    check_capturable(groups, variables)
    groups[0][0].param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.99))
    message = r"AdamW with a tensor in 'betas' of group 0\n.*\n  fix:  optimizer\.param_groups\[0\]\['betas'\] = float"
    with pytest.raises(ValueError, match=message):
        check_capturable(groups, variables)
