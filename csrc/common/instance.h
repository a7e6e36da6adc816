// Names for files that are compiled once per instruction set, CMAB_INSTRUCTION_SET. For example, with avx2,
// CMAB_TABLE(gram) is gram_avx2.
#pragma once

#define CMAB_JOINED_NAMES(name, set) name##_##set
#define CMAB_JOINED(name, set) CMAB_JOINED_NAMES(name, set)
#define CMAB_TABLE(name) CMAB_JOINED(name, CMAB_INSTRUCTION_SET)
