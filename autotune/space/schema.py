"""DeepSpeed's config schema as data: which keys there are, and which sections refuse others (DeepSpeed 0.19.8)."""

from __future__ import annotations

_ZERO = "zero_optimization"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _words(
    """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_efficiency data_parallel_size data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown
    optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """
)

# Sections that DeepSpeed checks: an unknown key in them is an error, and a value of "auto" is dropped.
STRICT: dict[str, frozenset[str]] = {
    name: _words(keys)
    for name, keys in {
        _ZERO: """
            allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload
            cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
            ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
            memory_efficient_linear offload_optimizer offload_param overlap_comm override_module_apply
            parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
            save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
            stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
            stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
            stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
            stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow
            zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
            """,
        f"{_ZERO}.offload_param": "buffer_count buffer_size device max_in_cpu nvme_path pin_memory",
        f"{_ZERO}.offload_optimizer": """
            buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
            super_offload
            """,
        f"{_ZERO}.zenflow": """
            auto_ratio full_warm_up_rounds offload overlap_step pt_reserved_cores_perc select_interval select_strategy
            steps_per_epoch topk_ratio update_interval
            """,
        "bf16": """
            bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update
            """,
        "fp16": """
            auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
            loss_scale loss_scale_window min_loss_scale
            """,
        "compile": """
            autoep_non_moe debug_log deepcompile double_buffer free_activation free_activation_threshold
            keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory
            offload_opt_states offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce
            sync_before_allgather sync_before_reduce
            """,
        "tensor_parallel": """
            autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model tp
            tp_overlap_comm vocab_parallel_ce_backend vocab_parallel_lm_head
            """,
        "hybrid_engine": """
            enable_cuda_graph enabled inference_tp_size max_out_tokens pin_parameters release_inference_cache
            tp_gather_partition_size
            """,
        "tensorboard": "enabled job_name output_path",
        "wandb": "enabled group project team",
        "csv_monitor": "enabled job_name output_path",
    }.items()
}

# Sections of which DeepSpeed reads the keys it knows and passes over the others.
LENIENT: dict[str, frozenset[str]] = {
    name: _words(keys)
    for name, keys in {
        "activation_checkpointing": """
            contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile
            synchronize_checkpoint_boundary
            """,
        "data_types": "buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype",
        "torch_autocast": "dtype enabled lower_precision_safe_modules",
        "aio": "block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds",
        "optimizer": "legacy_fusion params type",
        "scheduler": "params type",
    }.items()
}

# Whole numbers of zero_optimization, by the least that DeepSpeed takes.
SIZES: dict[str, int] = {
    f"{_ZERO}.{name}": 1 if name == "reduce_bucket_size" else 0
    for name in sorted(
        _words(
            """
            reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
            stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
            stage3_max_reuse_distance zero_hpz_partition_size offload_param.buffer_count offload_param.buffer_size
            offload_param.max_in_cpu offload_optimizer.buffer_count
            """
        )
    )
}

# Features that are gone; DeepSpeed refuses what is left of them.
REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    f"{_ZERO}.mics_shard_size",
    f"{_ZERO}.mics_hierarchical_params_gather",
    f"{_ZERO}.zeropp_loco_param",
)

# What DeepSpeed builds by these names in any case of letters; other optimizers are torch.optim's, spelt as there.
OPTIMIZERS = _words("adagrad adam adamw lamb muadam muadamw musgd lion muon")
TORCH_OPTIMIZERS = _words(
    """
    ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam
    """
)
ZERO_OPTIMIZERS = _words("adagrad adam adamw lion muon")
