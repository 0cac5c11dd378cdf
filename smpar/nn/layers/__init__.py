"""Layers of transformers that are made divided: SMP's ``smp.nn.Distributed*``.

::

    DistributedTransformerLMHead      word_embedding, position_embedding, transformer, layernorm, lm_head
    └ DistributedTransformer          seq_layers
      └ DistributedTransformerLayer   attention, cross_attention, output
        ├ DistributedAttentionLayer           pre_layernorm, query, key, value, dense, layernorm
        └ DistributedTransformerOutputLayer   pre_layernorm, dense1, gate, dense2, layernorm

Each can also be used alone. They have the values of undivided layers of the same seed.
"""
