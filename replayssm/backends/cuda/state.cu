// The state at a slot's cursor: the checkpoint that it reads, with its committed records folded in, as a flush of a window
// does it, but written elsewhere, and nothing else. A block takes one item.

// Decays of the records to the committed state.
template <class F> DEVICE void committed_decays(const Params& p, Memory<F>& m, const Row& at, int first_head, int warp, int lane) {
    if constexpr (F::CHANNEL) {
        barrier_wait(&m.keys_come, 0);
        for (int c = threadIdx.x; c < F::D_K; c += F::THREADS) m.committed[c] = expf(decay_keys<F>(m, at, c, 0.0f));
    } else {
        for (int n = warp; n < F::HEADS; n += F::WARPS) {
            const float* ring_g = ring_g_of<F>(p, at.slot, first_head + n);
            const float first = lane < at.cursor ? ring_g[lane] : 0.0f;
            const float all = decay_records<F>(m, at, n, ring_g, first, 1.0f, 0.0f, lane);
            if (lane == 0) m.heads[n].total = expf(all);
        }
        barrier_wait(&m.keys_come, 0);
    }
}

template <class F> DEVICE void fold_state(const Params& p, Memory<F>& m) {
    const Thread<F> me(threadIdx.x);
    Item<F> item{static_cast<u32>(blockIdx.x)};
    item.slot = p.slots[item.row()];
    const u32 phase = start<F>(p, m, item, me);
    const Row at = item.at();
    committed_decays<F>(p, m, at, item.first_head(), me.warp, me.lane);
    barrier_wait(&m.updates_come, 0);
    barrier_wait(&m.tile_comes, phase);
    sync_block();
    if constexpr (F::TO_SLOTS) {
        fold_tile<F>(m, at, checkpoint_of<F>(p, p.num_tokens[item.row()], item.first_row()), me.warp, me.lane);
    } else {
        const i64 row = static_cast<i64>(item.row()) * (F::V_HEADS * F::D_V) + item.first_row();
        fold_tile<F>(m, at, static_cast<float*>(p.y) + row * F::D_K, me.warp, me.lane);
    }
}

KERNEL(replayssm_fold, Params, Memory<Case>, fold_state<Case>)
