// Learning rate as a pure function of the step (reference ernie45-training 8). Steps count from 1, so the first step
// already moves.
//   warm-up   lr * t / warmup_steps for t <= warmup_steps (from 0, not from min_lr)
//   then, with q the progress in [0, 1] of what is left and lr = min_lr + (lr_max - min_lr) * r:
//   constant  r = 1
//   linear    r = 1 - q
//   cosine    r = max(0, (1 + cos(2 pi num_cycles q)) / 2)
//   wsd       r = 1 until wsd_stable_steps (-1: 0.9 * steps), then
//             half_life  r = (0.05^q - 0.05) / 0.95
//             1-sqrt     r = 1 - sqrt(q)
#pragma once

#include <cstdint>

#include "concerto/config/run_config.h"

namespace concerto {

double learning_rate(const OptimizerSection& optimizer, int64_t steps, int64_t step);

}  // namespace concerto
