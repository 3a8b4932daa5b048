// What torch asks of a device: its guard, its hooks, its random numbers.
#pragma once
#include <ATen/core/Generator.h>

#include "memory.h"

namespace sim {
void install_hooks();
bool has_hooks();
const at::Generator& default_generator(int device);
// A generator of the CPU for one kernel. As of Philox the host reserves the numbers and the kernel computes them later.
at::Generator drawn_from(const std::optional<at::Generator>& generator, int device);
}  // namespace sim
