// What the processor can do, asked once. Ordered: a level includes those below.
#pragma once

namespace concerto::cpu {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16 };

Isa detected_isa();   // of this processor and operating system
Isa active_isa();     // detected, capped by CONCERTO_ISA (Error(kUnsupported) if it names what the machine lacks or no known level)
const char* isa_name(Isa isa);

}  // namespace concerto::cpu
