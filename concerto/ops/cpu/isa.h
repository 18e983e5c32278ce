// What the processor can do, asked once. Ordered: a level includes those below.
#pragma once

#include <string_view>

namespace concerto::cpu {

enum class Isa {
  kGeneric,
  kAvx2,
  kAvx512,
  kAvx512Bf16,
  kAmxBf16,  // bf16 products on matrix tiles, with the operating system's leave to use their registers
};

Isa detected_isa();  // of this processor and operating system
Isa active_isa();    // detected, capped by CONCERTO_ISA (Error(kUnsupported) if it names what the machine lacks or no
                     // known level)
const char* isa_name(Isa isa);

// The level that `cap` (an isa_name, or empty for none) leaves of `detected`; the same errors as active_isa.
Isa isa_from_cap(std::string_view cap, Isa detected);

}  // namespace concerto::cpu
