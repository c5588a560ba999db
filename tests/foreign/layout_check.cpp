// Compiles only if this NCCL release's structs, the plugin ABI in plugin_abi.h, and the layout
// vectors agree on every size, alignment, offset, enum value and constant.
#include "device_code.h"
#include "plugin_abi.h"

#define FOREIGN_VERSION_HEADER "nccl_device/transport/net_efa_gda/efa-dp-direct/include/common/efa_cuda_dp_version.h"
// 2.31 defines these macros next to the types.
#if __has_include(FOREIGN_VERSION_HEADER)
#include FOREIGN_VERSION_HEADER
#endif

// The masks of the wire structs use this macro, which NCCL's header undefines.
#define BIT(nr) (1UL << (nr))

#include "layout_table.h"

static_assert(FOREIGN_PTR_HOST == 1 && FOREIGN_PTR_CUDA == 2 && FOREIGN_PTR_DMABUF == 4, "pointer types");
