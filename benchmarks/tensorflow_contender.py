"""Trains a workload with TensorFlow's MirroredStrategy on two logical CPUs; runs in an environment that has no torch.

    .venv-tf/bin/python benchmarks/tensorflow_contender.py gpt-8 --per-replica 8     # serves steps, see serving.py

The models are those of workloads.py: the same layers, sizes and dtypes. Images lie channels last, as TensorFlow wants
them on CPUs. A step is one `tf.function`: forward, loss and gradients on each replica, their sum over replicas, AdamW.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from serving import StepFunction, serve

layers = tf.keras.layers
NUM_REPLICAS = 2


def make_mlp() -> Any:
    """6 x Dense(2048) with ReLU, Dense(10)."""
    hidden = [layers.Dense(2048, activation="relu") for _ in range(6)]
    return tf.keras.Sequential([*hidden, layers.Dense(10)])


class Block(layers.Layer):
    """Causal self-attention and a feed-forward layer, each on a normalized input, added to it."""

    def __init__(self, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.attention_norm = layers.LayerNormalization(epsilon=1e-5)
        self.attention_in, self.attention_out = layers.Dense(3 * width), layers.Dense(width)
        self.mlp_norm = layers.LayerNormalization(epsilon=1e-5)
        self.mlp_in = layers.Dense(4 * width, activation=lambda x: tf.nn.gelu(x, approximate=True))
        self.mlp_out = layers.Dense(width)
        self.mask = np.triu(np.full((context, context), -1e9, np.float32), 1)

    def call(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        qkv = tf.reshape(self.attention_in(self.attention_norm(x)), (batch, tokens, 3, self.num_heads, self.head_width))
        q, k, v = tf.unstack(tf.transpose(qkv, (2, 0, 3, 1, 4)))
        scores = tf.matmul(q, k, transpose_b=True) * self.head_width**-0.5 + self.mask
        attended = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), (0, 2, 1, 3))
        x = x + self.attention_out(tf.reshape(attended, (batch, tokens, width)))
        return x + self.mlp_out(self.mlp_in(self.mlp_norm(x)))


class GPT(tf.keras.Model):
    """A byte-level GPT of 6 layers, width 384, 6 heads, 128 tokens."""

    def __init__(self, num_layers: int = 6, num_heads: int = 6, width: int = 384, context: int = 128) -> None:
        super().__init__()
        self.embedding = layers.Embedding(256, width)
        self.position = self.add_weight(shape=(context, width), initializer="random_normal")
        self.blocks = [Block(width, num_heads, context) for _ in range(num_layers)]
        self.norm = layers.LayerNormalization(epsilon=1e-5)
        self.head = layers.Dense(256, use_bias=False)

    def call(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(layers.Layer):
    """Two 3x3 convolutions with BatchNorm, added to the input (projected where sizes differ)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _convolution(channels, stride), _convolution(channels)
        self.norm1, self.norm2 = _batch_norm(), _batch_norm()
        same = stride == 1 and channels_in == channels
        self.project = None if same else layers.Conv2D(channels, 1, stride, use_bias=False)

    def call(self, x: Any) -> Any:
        h = tf.nn.relu(self.norm1(self.conv1(x), training=True))
        return tf.nn.relu(self.norm2(self.conv2(h), training=True) + (x if self.project is None else self.project(x)))


class ResNet(tf.keras.Model):
    """A small ResNet for 32x32 images: three stages of two blocks, 32, 64 and 128 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = _convolution(32), _batch_norm()
        shapes = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.blocks = [ResidualBlock(*shape) for shape in shapes]
        self.head = layers.Dense(10)

    def call(self, x: Any) -> Any:
        h = tf.nn.relu(self.norm(self.stem(x), training=True))
        for block in self.blocks:
            h = block(h)
        return self.head(tf.reduce_mean(h, (1, 2)))


def _convolution(channels: int, stride: int = 1) -> Any:
    return layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)


def _batch_norm() -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)


class Recommender(tf.keras.Model):
    """Embedding tables of 1 M rows together, and a small network on what is looked up."""

    def __init__(self, num_tables: int = 8, num_rows: int = 125_000, width: int = 32) -> None:
        super().__init__()
        self.tables = [layers.Embedding(num_rows, width) for _ in range(num_tables)]
        sizes = [layers.Dense(256, activation="relu"), layers.Dense(64, activation="relu"), layers.Dense(1)]
        self.head = tf.keras.Sequential(sizes)

    def call(self, rows: Any) -> Any:
        found = [table(rows[:, i]) for i, table in enumerate(self.tables)]
        return tf.squeeze(self.head(tf.concat(found, 1)), 1)


@dataclass(frozen=True)
class Workload:
    """As in workloads.py: a model, the mean loss of (target, output), and the arrays of so many examples."""

    make_model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    make_batch: Callable[[int], tuple[np.ndarray, np.ndarray]]


def _cross_entropy(target: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits))


def _binary_cross_entropy(target: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(target, logits))


def _squared_error(target: Any, output: Any) -> Any:
    return tf.reduce_mean((output - target) ** 2)


_random = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _random.standard_normal(shape, dtype=np.float32)


def _whole(limit: int, *shape: int) -> np.ndarray:
    return _random.integers(0, limit, shape)


_MLP = Workload(make_mlp, _cross_entropy, lambda n: (_normal(n, 2048), _whole(10, n)))
WORKLOADS = {
    "mlp-64": _MLP,
    "mlp-8": _MLP,
    "gpt-8": Workload(GPT, _cross_entropy, lambda n: (_whole(256, n, 128), _whole(256, n, 128))),
    "resnet-16": Workload(ResNet, _cross_entropy, lambda n: (_normal(n, 32, 32, 3), _whole(10, n))),
    "recommender-256": Workload(
        Recommender, _binary_cross_entropy, lambda n: (_whole(125_000, n, 8), _whole(2, n).astype(np.float32))
    ),
    "tiny": Workload(lambda: layers.Dense(4), _squared_error, lambda n: (_normal(n, 4), _normal(n, 4))),
}


class AdamW:
    """torch's AdamW by TensorFlow's fused kernel for Adam: Keras's own takes a dozen operators for each parameter.

    Args:
        variables: mirrored variables; to be made under the strategy's scope.
    """

    def __init__(self, variables: list[Any], learning_rate: float = 1e-3, weight_decay: float = 1e-2) -> None:
        self.variables = [variable.value for variable in variables]
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.count = tf.Variable(0.0, trainable=False)
        self.means, self.squares = (
            [tf.Variable(tf.zeros(v.shape), trainable=False) for v in variables] for _ in range(2)
        )

    def step(self, gradients: list[Any]) -> None:
        """Sums gradients over replicas and updates this replica's copies; an embedding's other rows move on, too."""
        summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        tf.raw_ops.AssignAddVariableOp(resource=self.count.handle, value=1.0)
        count = tf.raw_ops.ReadVariableOp(resource=self.count.handle, dtype=tf.float32)
        for variable, mean, square, gradient in zip(self.variables, self.means, self.squares, summed, strict=True):
            decay = self.learning_rate * self.weight_decay * variable.read_value()
            tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=decay)
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=mean.handle,
                v=square.handle,
                beta1_power=0.9**count,
                beta2_power=0.999**count,
                lr=self.learning_rate,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-8,
                grad=tf.convert_to_tensor(gradient),
            )


def make_step(workload: Workload, per_replica: int, intra_op_threads: int) -> StepFunction:
    """A training step on two logical CPUs, which run operators at the same time, each with so many threads."""
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(NUM_REPLICAS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(NUM_REPLICAS)])
    x, y = workload.make_batch(per_replica * NUM_REPLICAS)
    with strategy.scope():
        model = workload.make_model()
        model(x[:per_replica])  # makes its variables
        optimizer = AdamW(model.trainable_variables)

    def shards(whole: np.ndarray) -> Any:
        parts = np.split(whole, NUM_REPLICAS)
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = workload.loss(y, model(x)) / NUM_REPLICAS
        optimizer.step(tape.gradient(loss, optimizer.variables))
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, (x, y)), axis=None)

    xs, ys = shards(x), shards(y)
    return lambda: step(xs, ys).numpy()


def main() -> None:
    """The contender's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--per-replica", type=int, required=True, help="examples of a batch for each replica")
    parser.add_argument("--intra-op-threads", type=int, default=1, help="threads of one operator")
    options = parser.parse_args()
    serve(lambda: make_step(WORKLOADS[options.workload], options.per_replica, options.intra_op_threads))


if __name__ == "__main__":
    main()
