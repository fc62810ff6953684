// The router's choice: see matrix.h.
#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "scratch.h"
#include "thread_pool.h"

namespace mosaic {
namespace {

constexpr std::size_t kTokensPerTask = 32;

void route_one(const float* logits, std::size_t count, std::size_t top_k, bool normalize, std::vector<bool>& taken,
               std::int64_t* experts, float* weights) {
    taken.assign(count, false);
    for (std::size_t rank = 0; rank < top_k; ++rank) {
        std::size_t best = count;
        for (std::size_t i = 0; i < count; ++i)
            if (!taken[i] && (best == count || logits[i] > logits[best])) best = i;
        taken[best] = true;
        experts[rank] = static_cast<std::int64_t>(best);
        weights[rank] = logits[best];
    }
    const float most = weights[0];
    double total = 0.0;
    for (std::size_t rank = 0; rank < top_k; ++rank) weights[rank] = std::exp(weights[rank] - most);
    if (normalize)
        for (std::size_t rank = 0; rank < top_k; ++rank) total += weights[rank];
    else
        for (std::size_t i = 0; i < count; ++i) total += std::exp(logits[i] - most);
    for (std::size_t rank = 0; rank < top_k; ++rank) weights[rank] = static_cast<float>(weights[rank] / total);
}

}  // namespace

void route(const float* logits, std::size_t tokens, std::size_t count, std::size_t top_k, bool normalize,
           const float* shared, std::int64_t* experts, float* weights) {
    const std::size_t ranks = top_k + (shared == nullptr ? 0 : 1);
    parallel_for(ceil_div(tokens, kTokensPerTask), [&](std::size_t task) {
        static thread_local std::vector<bool> taken;
        for (std::size_t token = task * kTokensPerTask; token < std::min(tokens, (task + 1) * kTokensPerTask); ++token) {
            std::int64_t* const numbers = experts + token * ranks;
            float* const shares = weights + token * ranks;
            route_one(logits + token * count, count, top_k, normalize, taken, numbers, shares);
            if (shared == nullptr) continue;
            numbers[top_k] = static_cast<std::int64_t>(count);
            shares[top_k] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(shared[token]))));
        }
    });
}

}  // namespace mosaic
