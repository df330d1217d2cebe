// What torch asks of a CUDA driver when autograd runs on fake tensors of device cuda: which device
// is current, which stream. There is no driver: devices are numbers, streams and events are empty.
//
// A build of torch for CUDA has both of its own. Of hooks torch keeps the first that it makes, those
// of the highest priority: so this is loaded before torch is imported. Of guards it keeps the last:
// `replace_guard` is called afterwards.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kDevices = 64;  // more than any node has
thread_local c10::DeviceIndex device_of_thread = 0;

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kCuda;

  c10::DeviceType type() const override { return kCuda; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  // Devices
  c10::Device getDevice() const override { return {kCuda, device_of_thread}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  // Streams: every device has one
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  // Events: they have happened
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

}  // namespace

extern "C" void replace_guard() {
  c10::impl::DeviceGuardImplRegistrar(kCuda, new FakeGuard());
}

namespace at {

// torch looks for a class of this name.
struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  DeviceIndex current_device() const override { return device_of_thread; }
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at
