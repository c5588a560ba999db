// Compiles only if the layouts in ferrogin's headers match NCCL's structs.
#include <ferrogin/nccl_gin.cuh>

#include <nccl_device/transport/net_efa_gda/efa-dp-direct/include/common/efa_cuda_dp_types.h>

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
FGIN_QUEUE_LAYOUTS_232(FGIN_ASSERT_TYPE, FGIN_ASSERT_FIELD)
#else
FGIN_QUEUE_LAYOUTS_231(FGIN_ASSERT_TYPE, FGIN_ASSERT_FIELD)
#endif
