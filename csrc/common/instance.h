// For files that are compiled once for each instruction set, with CMAB_INSTRUCTION_SET: CMAB_TABLE(gram) is gram_avx2.
#pragma once

#define CMAB_JOINED_NAMES(name, set) name##_##set
#define CMAB_JOINED(name, set) CMAB_JOINED_NAMES(name, set)
#define CMAB_TABLE(name) CMAB_JOINED(name, CMAB_INSTRUCTION_SET)
