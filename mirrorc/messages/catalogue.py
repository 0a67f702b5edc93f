"""The codes of errors and warnings, with titles and explanations for pages and ``mirrorc explain-error``."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A code's explanation, in Markdown."""

    code: str
    title: str
    text: str
    group: str


def _parsed(catalogue: str) -> dict[str, Entry]:
    entries, group = dict[str, Entry](), ""
    for block in catalogue.strip().split("\n\n"):
        head, _, text = block.partition("\n")
        if head.startswith("# "):
            group = head.removeprefix("# ")
            continue
        code, _, title = head.partition(" ")
        assert re.fullmatch(r"MC\d{4}", code) and code not in entries and title and text, head
        entries[code] = Entry(code, title, text, group)
    return entries


ENTRIES = _parsed("""
# Options and arguments

MC1001 An option of another type
The message names the option and what it takes. `mirrorc.Communication(buckets=25)` takes a number, not `"25"`.

MC1002 An option with a value that is not allowed
The message names the values. For the backend: `mirrorc.Compiler(backend="eager")` or `"inductor"`.

MC1003 Options that exclude each other
Leave one of them out. [Options](../reference/options.md) lists what each excludes.

MC1004 An option beside `passes=`
Put the pass that the message names there, or keep the option and use `add=[mirrorc.after("pack-gradients", MyPass())]`.

MC1005 An unknown keyword
Options of a topic are fields of a group: `mirrorc.compile(..., compiler=mirrorc.Compiler(backend="eager"))`.

MC1006 A name of an earlier version
The message says what to write now.

MC1101 An unknown name of a device
Names are `"cpu:0"`, `"cuda:1"`, and `"cuda:0/1"` for a second logical device of GPU 0. Any machine has `"cpu:1"`.

MC1102 A device that torch does not see
`torch.cuda.device_count()` says how many GPUs there are; `CUDA_VISIBLE_DEVICES` may hide some.

MC1103 Devices that do not go together
All devices are of one type, and each is named once: `["cuda:0", "cuda:1"]`, or `["cuda:0", "cuda:0/1"]` on one GPU.

MC1104 A link that cannot join the devices
Leave `link=` out for the best one. Over several workers it is `"shared-memory"` on CPUs.

MC1201 No model
Give a `torch.nn.Module`. A function of the batch that returns the loss needs the modules that it calls:
`mirrorc.compile(loss_of, devices, optimizer=optimizer, modules=[net])`.

MC1202 A model or optimizer that distributes by itself
Unwrap it: `model.module` of a `DistributedDataParallel`. For a sharded optimizer: `mirrorc.Memory(shard_optimizer=True)`.

MC1203 A parameter without memory
`model(example)` for lazy modules; `model.to_empty(device="cpu")` and an initialization for the meta device.

MC1204 No trainable parameter
`model.requires_grad_(True)`, or on the parts that are to be trained.

MC1205 A ScriptModule that cannot be trained
Give the module as it was before `torch.jit`, with `load_state_dict` of the scripted one's state.

MC1206 A parameter that was replaced, hidden or added after compile
Write into the old tensors, as `model.load_state_dict(state)` does, or make the optimizer and the step or module anew.

MC1207 A hook on a gradient
A captured step does not call it. Change gradients in the loss, or by `optimizer.register_step_pre_hook(...)`.

MC1208 Memory that is shared
Tie weights by the parameter, `head.weight = embedding.weight`, not by `.data`. Share copies with other processes.

MC1211 No optimizer
`mirrorc.compile(..., optimizer=optimizer)`. Without one, `step.gradients(x, y)` leaves gradients in `p.grad`.

MC1212 An optimizer that needs a closure
`LBFGS` evaluates the model several times in a step. Leave `optimizer=` out, and give it a closure that returns
`step.gradients(x, y)`.

MC1213 An optimizer over other parameters
Make it after `.to()`, `deepcopy` and parametrizations, over `model.parameters()` of the model that is compiled.

MC1214 A parameter or an optimizer that is given twice
Several optimizers of one step update different parameters.

MC1215 State of the optimizer that does not fit
`optimizer.state.clear()` after a change of shapes; `optimizer.load_state_dict(optimizer.state_dict())` casts dtypes.

MC1216 An optimizer that cannot take such gradients
`nn.Embedding(..., sparse=True)` needs `SparseAdam`, or `SGD` or `Adagrad` without weight decay. Dense gradients need another.

MC1301 A call that does not fit forward
With a `loss_fn`, the target is last or named: `step(x, y)` or `step(x, target=y)`. All else goes to `forward`.

MC1302 An argument that is no plain tensor
`torch.from_numpy(x)`; for a subclass `x.as_subclass(torch.Tensor)`.

MC1303 A tensor that cannot be split
Nested, sparse and quantized tensors: `x.to_padded_tensor(0.0)`, `x.to_dense()`, `x.dequantize()`.

MC1304 Arguments with different numbers of examples
Each tensor is split along dim 0. What has no row for each example is the same for all: `mirrorc.replicated(mask)`.

MC1305 A batch without examples
`if len(x):` around the call. Over several workers, `with step.join():`, or `drop_last=True` on all of them.

MC1306 Nothing to split
Give the batch as tensors whose dim 0 counts examples. A scalar tensor is passed as `mirrorc.replicated(scalar)`.

MC1307 A PerReplica that does not fit
It has a value for each device, all of one structure: `mirrorc.PerReplica([x0, x1])`. `reduce` and `gather` take tensors inside.

MC1308 An argument that requires a gradient
`step(x.detach(), y)`, or one module that holds both models. A module of `mirrorc.data_parallel` takes plain tensors that do.

MC1309 A container that cannot be made again
Shards need containers of their own. Pass a plain `dict`, `list` or `tuple`, or a dataclass.

MC1310 A list that may have an item for each example
`mirrorc.examples(list)` splits it by items, all of one structure; `tuple(list)` splits each tensor in it along dim 0.

MC1401 A loss_fn that is a class
`loss_fn=nn.CrossEntropyLoss()`, with parentheses; or a function, `torch.nn.functional.cross_entropy`.

MC1501 CUDA graphs that cannot hold the step
A CUDA graph replays the same launches with the same memory. `mirrorc.Compiler(cuda_graphs=False)` is the default.

MC1502 Another backend than asked for
Inductor cannot be used here, mostly for lack of a C++ compiler. `mirrorc.Compiler(backend="eager")` says that it is wanted.

MC1503 An all-reduce algorithm that does not fit the devices
Leave `algorithm=` out, or choose one that the message names. [All-reduce](../compiler/all-reduce.md) compares them.

MC1504 A bound of gradients that does not fit the groups
One number bounds the norm of all gradients: `clip_grad_norm=1.0`. A sequence has a number or None for each group.

MC1505 A placement that names what is not there
Keys are names in `model.named_parameters()`, values are names of devices.

MC1506 A plan of buckets that is not whole
A function given as `buckets=` returns lists of names, with each gradient once. One given as `order=` returns a key.

MC1507 A compression that breaks its interface
A `mirrorc.compression.Payload` is a frozen dataclass with `exchange` and `num_bytes`.

MC1508 A memory bound that cannot be reached
The message says how low the peak can be. Raise `mirrorc.Memory(activations="60%")`, or take smaller batches.

MC1601 An attribute of a step that cannot be set
`mirrorc.compile(..., clip_grad_norm=1.0)` sets options; a learning rate is changed in `optimizer.param_groups`.

MC1602 A step that is copied or pickled
Save `step.state_dict()`, or copy the model and the optimizer and compile the copy.

MC1603 A wrong argument of `mirrorc.join`
`with mirrorc.join(d_step, g_step):` takes the steps that the block calls.

MC1604 A compiled module that is moved
Its devices are fixed. Move or cast the plain model before: `mirrorc.data_parallel(model.to(...), devices=...)`.

MC1701 A wrong value for other replicas
`mirrorc.all_reduce` adds tensors of numbers, `mirrorc.all_gather` puts rows together: `mirrorc.all_gather(value[None])`.

# Capture

MC2101 A model that cannot be traced
Change the line after `at:` as the message says. A step, not a module, may also run as plain PyTorch:
`compiler=mirrorc.Compiler(capture="autograd")`. [Capture](../concepts/capture.md) has the rules.

MC2102 A branch on the values of tensors
`if x.sum() > 0:` becomes `torch.where(x.sum() > 0, a, b)`, and `x.max().item()` becomes `x.max()`.

MC2103 Your code raises an exception
Model or loss raise it on one shard in plain PyTorch, too. Try `loss_fn(model(x[:4]), y[:4])`.

MC2104 One example where torch needs two
BatchNorm in train mode and `x.std()` need two examples on each device. Use larger batches, `drop_last=True`, or fewer devices.

MC2201 No loss
Give `loss_fn=`, or let the model return the loss, as models of Hugging Face do if they are given `labels=`.

MC2202 A loss that is no scalar
`loss.mean()`; or `loss.sum()` with `loss_reduction="sum"`. Of several items the first is the loss: `return loss, logits`.

MC2203 A loss, or outputs, without a gradient for any trained parameter
`.detach()`, `.item()`, `torch.no_grad()` or `argmax` cuts the graph; or the optimizer has other parameters. A module's outputs
are real: `torch.view_as_real(output)`.

MC2204 A loss of another dtype
A loss is one real number of floating point: `loss.float()`, and `loss.real` for a complex one.

MC2301 Forward keeps something that differs between replicas
What is the same for every shard is carried on from step to step. Keep the rest in a buffer:
`self.register_buffer("h", torch.zeros(8))` in `__init__` and `self.h.copy_(value)` in forward; or return it.

MC2302 Forward changes an object of yours
Replicas have containers of their own. Change a copy, `batch = dict(batch)`, and return what is to last.

MC2303 Numbers or items that are drawn outside of torch
Replicas would share the generator, iterator or file. `torch.rand(())` is drawn anew in each step; or draw before the step.

MC2304 Forward writes where a step cannot
Parameters change in the optimizer only. Clone an argument before you write it, and write detached values to buffers.

MC2305 A tensor that was computed before the step
Its backward lies outside of the step. Compute it in forward or in the loss, or pass `value.detach()`.

MC2306 A parameter reached past the modules
Each replica has modules of its own. Reach parameters through `self`, and use `torch.nn.utils.parametrizations`.

MC2401 An output that cannot be put together
Return tensors with a row for each example, means, or sums marked by `mirrorc.summed(count)`.

MC2402 `mirrorc.summed` that does not mark an output
Mark the tensor that is returned, after everything that is computed of it: `return loss, mirrorc.summed(correct)`.

MC2403 Outputs that could not be put together in this call
The update was made. The message has the reason.

MC2501 Sparse gradients that are not supported here
`nn.Embedding(..., sparse=False)` always works. [Sparse embeddings](../how-to/sparse-embeddings.md) says what else does.

MC2502 A recurrent layer with time first
A step splits dim 0. Use `nn.LSTM(..., batch_first=True)`.

MC2503 Values of other replicas that cannot be exchanged
All replicas make the same calls, with shapes that go together: use even batches. A module has none over several workers.

MC2504 A graph that depends on the size of the shard
Use batches that divide by the number of devices: `DataLoader(..., drop_last=True)`.

MC2505 A spectral norm that differs between replicas
Call its module as often whatever the number of examples is.

MC2506 An operator that is called for its effect alone
Call it between steps, or let it return a tensor that the loss depends on.

MC2507 A checkpoint policy that a step cannot follow
Return `MUST_SAVE` or `PREFER_RECOMPUTE`.

MC2508 An operator that needs a certain layout
It addresses elements by their position in memory. Give it `x.contiguous()`.

MC2601 Forward did something else than when it was captured
With `capture="autograd"` each call runs your code, and a step needs the same writes, draws and outputs each time.

MC2602 A backward within backward
An `autograd.Function` returns gradients; it does not call `.backward()`.

MC2701 Trains as plain PyTorch
Training is right, without fusion. `mirrorc.Compiler(capture="autograd")` says that it is wanted, and ends the warning.

# Warnings about results

MC3101 A mean whose divisor differs between shards
Class weights and `ignore_index` make `cross_entropy` divide by a number of each shard, as under DDP. For the exact mean:
`cross_entropy(x, y, reduction="sum") / constant`. `mirrorc.check_loss` measures the difference.

MC3102 A sum where the step takes a mean, or the reverse
`mirrorc.compile(..., loss_reduction="sum")` for losses that are sums over the examples; leave it out for means.

MC3103 A loss that differs between a batch and its shards
`mirrorc.check_loss` found it, or could not compare. The message has the reason.

MC3201 `loss.backward()` without effect
A step runs backward and updates. Leave the call out.

MC3202 `optimizer.step()` without effect
A step updates by itself. Leave the call out; with `step.accumulate(...)`, end with `step(...)` on the last batch.

MC3203 Clipping without effect
Gradients are gone when the step returns. `mirrorc.compile(..., clip_grad_norm=1.0)` clips them before the update.

MC3204 Gradients of your own that were dropped
A step trains on its own batch. Put the other loss into `loss_fn`, or update by yourself, and then `optimizer.zero_grad()`.

MC3206 Accumulated gradients without an update
End an accumulation by a call of the step, or drop what is kept: `step.zero_grad()`.

MC3207 A view of parameters from before the first step
The first step moves parameters. Call `model.state_dict()` after it, or copy: `copy.deepcopy(model.state_dict())`.

MC3208 A mode of torch that devices do not see
Modes belong to a thread. Use the mode on the plain model between steps.

MC3209 A gradient that nothing can be added to
`p.grad = None`, or `p.grad = p.grad.clone()`, before `step.gradients(x, y)`.

MC3210 A second backward, or a gradient of a gradient
A module of `mirrorc.data_parallel` has the one with `retain_graph=True`, and the other in plain PyTorch: `model.module(x)`.

MC3301 A change of an object that a captured step does not repeat
Return the value with `return_outputs=True`, or keep it in a buffer.

MC3302 A call that a captured step does not repeat
`print` and the like run while the step is captured. Call them between steps, on what the step returns.

MC3303 Items taken out of an argument
Replicas take them out of containers of their own, and yours keeps them.

MC3304 Attributes that do not reach the model
A step has them for the call alone, on each replica. Return them, or keep them in buffers.

MC3305 A tensor that gets no gradient
Register it: `self.scale = nn.Parameter(...)` in the model, or in a loss that is a module.

MC3306 A buffer that keeps rows of examples
Each replica writes those of its shard. `self.bank[mirrorc.all_gather(i)] = mirrorc.all_gather(rows)` writes all rows on each.

MC3401 A dynamic size of 0 or 1
torch makes other graphs for these sizes, so the size is a number until a larger one comes.

MC3402 An output whose batch dim is not known
It comes as a `PerReplica`. Call the step with another size of batch once, or return a tensor with a row for each example.

MC3403 Compiled many times
Pass what changes as tensors, keep sizes alike, or `mirrorc.Compiler(dynamic=True)`. See [recompiles](recompiles.md).

MC3404 A CUDA graph that is dropped again and again
Change hyperparameters other than the learning rate less often.

MC3501 Workers with the same batch
`DistributedSampler(dataset, step.num_workers, step.rank)` gives each its own; `step.shard_batch(batch)` cuts a common one.

MC3502 Values of one worker that were replaced
Write the same on all workers, or load checkpoints on all of them.

# Passes and the verifier

MC4001 A pass that failed
A fault of the pass. The message ends with a command that repeats it on a saved program.

MC4002 Passes in a wrong order
Each pass takes programs of one stage: `mirrorc.passes.default_pipeline()` has the order.

MC4003 A pass that cannot do it with this program
The message names the pass that is missing, or the option that does not go with it.

MC4004 A pass or pipeline that cannot be read
As text a pipeline is `plan-buckets{buckets=5.0},outline-regions`, and a pass of your own `module:Class`.

MC4005 A registration that is missing or made twice
Operations, links, backends, rules and options have names of their own.

MC4101 A program that breaks a rule
The fault is in the pass that the message names. [The verifier](../compiler/verifier.md) lists the rules.

MC4102 An edited program of another step
[Editing programs](../compiler/editing-programs.md) says what may be edited.

# Execution

MC5001 An exception on a device
The line after `at:` raised it. `mirrorc.Compiler(backend="eager")` names the operator exactly.

MC5002 An accumulation that failed
`step.zero_grad()` drops the gradients that are kept.

MC5003 A step or module that is closed
`close()` and the end of a `with` block end its threads. Compile a new one.

MC5004 Two calls at once
Calls over the same parameters run one after the other, on the same devices.

MC5005 A report before there is anything to report
`step.program` needs a compiled call, `step.explain()` a training step: `step(x, y)`, or `loss.backward()`, first.

MC5006 A step in inference mode
Call it outside of `torch.inference_mode()`. `step.evaluate(...)` needs no such block.

MC5007 A device that does not answer in time
An operator hangs, or a step takes that long: `mirrorc.Communication(timeout=600)`.

MC5008 Another thread that does not end
Only one thread at a time captures, or draws random numbers. See what its forward waits for.

MC5009 A step or module in a forked process
Threads do not survive a fork. Compile in the child, or `multiprocessing.set_start_method("spawn")`.

MC5010 Parameters between two steps
An update failed midway. Load a checkpoint into model and optimizer.

MC5011 Copies of a parameter that differ
Memory has gone bad, or something has written to one copy. Load a checkpoint.

MC5101 A loss or gradient that is not finite
Nothing was updated. Look at the batch and the learning rate, or `mirrorc.compile(..., check_finite="skip")` to go on.

# Workers

MC6101 One worker where several are asked for
`torchrun --nproc-per-node=2 train.py`.

MC6102 Workers with devices of different types
All use CPUs, or all use GPUs.

MC6103 A worker with too many devices
Over several workers, a GPU each: `torchrun --nproc-per-node=gpu train.py`.

MC6104 Numbers of workers or devices that do not fit
`mirrorc.World(num_workers=2, devices_per_worker=1)`, and a rank below `num_workers`.

MC6105 Factors over unlike machines
Each machine would compute other bits of the same product. `mirrorc.Communication(exchange="dense")`.

MC6106 A wrong process group
Give the group of all workers that train together, or None for the default group.

MC6107 Environment variables that describe no cluster
torchrun sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; TF_CONFIG is an object. Unset them to train alone.

MC6201 A call that failed on a worker
Another worker failed, ended or hangs; the message names it. The line after `now:` says what parameters are.

MC6202 Workers that cannot go on
End all of them, and start them again from a checkpoint.

MC6203 A worker that did not come
It hangs, has ended, or makes other calls. Look at its output; `mirrorc.Communication(timeout=600)` waits longer.

MC6204 The store was lost
Worker 0, or torchrun's agent, has opened it. See why that process ended, and whether a firewall cuts the connection.

MC6205 Workers that could not join
All have the same address and number of workers, each a rank of its own, and the same versions.

MC6301 Workers that differ
All make the same calls in one order, with the same model, options, seeds and updates.

MC6302 A call that does not fit `step.join()`
Workers that have left take part in the calls of others: put one block around the loop, and calls of other steps after it.

MC6303 No examples on any worker
Leave the batch out on all of them.

MC6401 Workers with states of different steps
Load the same checkpoint on all, and call the step again.

MC6402 A sharded optimizer state
`step.gather_optimizer_state()` on all workers makes it whole for saving, until the next step.

MC6403 State of the optimizer that cannot be sent
It must be picklable: define functions and classes at the top of a module.

# Checkpoints and files

MC7001 A state of another model
Compile the same model for as many devices, with as many optimizers and a scaler as before, and load again.

MC7002 Something that is no state of a step
`step.load_state_dict(state)` takes what `step.state_dict()` gave.

MC7003 A state at the wrong time
Save after an update, and load before the first call.

MC7004 A folder that is no checkpoint
`mirrorc.save_checkpoint(step, "run/last")` writes it, and `load_checkpoint` takes the same folder.

MC7005 A worker that could not save
The earlier checkpoint stays. See whether its disk is full.

MC7006 States of workers that do not belong together
With compression each worker has gradients that are not sent yet: give the list of all workers' states of one run.

MC7007 Buffers of another checkpoint
Load the model and the step of the same checkpoint.

MC7101 A program that cannot be saved
It has values that no file keeps, such as Python code of `capture="autograd"`.

MC7102 A file from which no program can be read
Give what `step.program.save("program.mirror.gz")` has written, with this version of mirrorc and torch.

MC7103 A dump that cannot be written
Training goes on. Make room, or name another folder: `mirrorc.Debug(dump="/tmp/dump")`.

MC7104 A printed program that cannot be read
Print it anew by `program.to_text()`; cut or edited texts cannot be compared.

MC7201 A check of a program that is wrong itself
`mirrorc.testing.check(step, "CHECK: update(")` needs lines that begin with a known directive.
""")
