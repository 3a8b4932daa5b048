// What has happened, by name: kernels, copies, collectives, waits.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace sim {
void count(const std::string& what);
std::map<std::string, int64_t> counts();
void reset_counts();
}  // namespace sim
