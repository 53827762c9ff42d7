// Lets torch without CUDA run operations on tensors that say they are on a GPU and hold nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
