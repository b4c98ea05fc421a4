"""GPipe: each stage holds consecutive layers, all microbatches pass through the stages once."""

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class GPipe(nnx.Module):
  """S stages and M microbatches in M + S − 1 iterations; stage s works on microbatch t − s in iteration t.

  Attributes:
    layers: the stages' layers, arrays [stage, …]: where MaxText and `maxtext-pp convert` look for them.
  """

  def __init__(self, config, stage_factory, mesh, remat_policy=None, *, rngs):
    del remat_policy  # all activations are kept
    if config.num_pipeline_repeats > 1:
      raise NotImplementedError(
          f"pipeline_impl=gpipe has one repeat, but num_pipeline_repeats={config.num_pipeline_repeats}. Set "
          f"num_layers_per_pipeline_stage={config.num_layers_per_pipeline_stage * config.num_pipeline_repeats}."
      )
    if config.num_experts > 1:
      raise NotImplementedError(f"pipeline_impl=gpipe drops load-balance losses, but num_experts={config.num_experts}.")
    self.microbatches, self.mesh = config.num_pipeline_microbatches, mesh
    self.stages = config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism
    # "layers" is the logical name of the new axis; MaxText's rules shard it over the mesh axis `stage`.
    stack = nnx.vmap(stage_factory, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    self.layers = stack(rngs.fork(split=self.stages))

  def get_weight_sharding(self, *init_args):
    """The logical PartitionSpecs of the parameters, which MaxText may pass on to `__call__`."""
    del init_args
    names = lambda v: P(*(v.get_metadata().get("out_sharding") or ()))
    return jax.tree.map(names, nnx.state(self.layers, nnx.Param), is_leaf=lambda v: isinstance(v, nnx.Variable))

  def __call__(self, inputs, segment_ids, positions, deterministic, model_mode="train", logical_partition_spec=None):
    """Runs the layers on activations [batch, sequence, embed], ids and positions [batch, sequence]."""
    del logical_partition_spec
    graph, state = nnx.split(self.layers)
    split = lambda x: None if x is None else x.reshape(self.microbatches, -1, *x.shape[1:])
    waiting, ids, positions = split(inputs), split(segment_ids), split(positions)

    def stage(state, x, ids, positions):
      out = nnx.merge(graph, state)(x, ids, positions, deterministic, model_mode)
      return out[0] if isinstance(out, tuple) else out

    run = jax.vmap(stage, spmd_axis_name="stage")
    on_stages = NamedSharding(self.mesh, P("stage"))
    numbers = jnp.arange(self.stages)
    x = jnp.zeros((self.stages, *waiting.shape[1:]), waiting.dtype)
    outputs = []
    for t in range(self.microbatches + self.stages - 1):
      x = x.at[0].set(waiting[min(t, self.microbatches - 1)])
      at = jnp.clip(t - numbers, 0, self.microbatches - 1)  # each stage's microbatch; in bubbles any
      of_each = [None if all_ is None else all_[at] for all_ in (ids, positions)]
      x = run(state, jax.lax.with_sharding_constraint(x, on_stages), *of_each)
      if t >= self.stages - 1:
        outputs.append(x[-1])
      x = jnp.roll(x, 1, axis=0)  # to the next stage: a permute over the mesh axis `stage`
    return jnp.concatenate(outputs)
