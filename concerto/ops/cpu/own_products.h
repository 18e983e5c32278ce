// The products of the backend tables on kernels of our own (product.h), by instruction set.
#pragma once

#include "concerto/ops/backend.h"
#include "concerto/ops/cpu/isa.h"

namespace concerto::cpu {

LinearKernels own_linear_kernels(Isa isa);
GroupedLinearKernels grouped_linear_kernels(Isa isa);
void fill_router_products(RouterKernels& router, Isa isa);  // logits and their two gradients

}  // namespace concerto::cpu
