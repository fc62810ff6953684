// Asks the CPU once what it supports and picks the instruction set. Not compiled for any ISA beyond the baseline.
#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

#ifdef MOSAIC_X86
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mosaic {
namespace {

#ifdef MOSAIC_X86
// The compiler's runtime also asks the operating system (xgetbv) whether it saves the wide registers.
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bf16");
}

// Linux saves tiles only for processes that asked for it; it refuses if a thread's signal stack is too small for them.
bool has_amx() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

std::vector<Isa> detect() {
    std::vector<Isa> isas = {
        {"scalar", &scalar::kernels, &scalar::sequence_kernels, &scalar::matrix_kernels, &scalar::measure_kernels}};
#ifdef MOSAIC_X86
    if (has_avx2())
        isas.push_back({"avx2", &avx2::kernels, &avx2::sequence_kernels, &avx2::matrix_kernels,
                        &avx2::measure_kernels});
    if (has_avx512())
        isas.push_back({"avx512", &avx512::kernels, &avx512::sequence_kernels, &avx512::matrix_kernels,
                        &avx512::measure_kernels});
    if (has_amx())
        isas.push_back({"amx", &avx512::kernels, &avx512::sequence_kernels, &amx::matrix_kernels,
                        &avx512::measure_kernels});
#endif
    return isas;
}

const Isa& find(const std::string& name, const std::string& asked_by, const std::string& remedy) {
    std::string possible;
    for (const Isa& isa : supported_isas()) {
        if (name == isa.name) return isa;
        if (!possible.empty()) possible += ", ";
        possible += isa.name;
    }
    throw std::invalid_argument(asked_by + " is '" + name + "', expected one that this build and this CPU have: " +
                                possible + "; " + remedy);
}

const Isa& choose() {
    const char* forced = std::getenv("MOSAIC_ISA");
    if (forced == nullptr || *forced == '\0') return supported_isas().back();
    return find(forced, "the environment variable MOSAIC_ISA", "unset it to use the fastest of them");
}

}  // namespace

const std::vector<Isa>& supported_isas() {
    static const std::vector<Isa> isas = detect();
    return isas;
}

const Isa& active_isa() {
    static const Isa& isa = choose();
    return isa;
}

const Isa& isa_named(const std::string& name) {
    return name.empty() ? active_isa() : find(name, "isa", "leave it empty to use the active one");
}

}  // namespace mosaic
