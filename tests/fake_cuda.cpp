// Streams, events and hooks of an imitated CUDA device, for the autograd engine of a CPU build.
// It logs whatever orders two streams, or waits for the device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <mutex>
#include <string>

using namespace c10;

namespace {

const Device device(DeviceType::CUDA, 0);
thread_local StreamId current_stream = 0;
std::mutex log_mutex;
std::string events;

void log(const std::string& event) {
  std::lock_guard<std::mutex> lock(log_mutex);
  events += event + "\n";
}

Stream make_stream(StreamId id) { return Stream(Stream::UNSAFE, device, id); }

struct ImitatedGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device; }
  Device exchangeDevice(Device) const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return make_stream(current_stream); }
  Stream getDefaultStream(Device) const override { return make_stream(0); }
  Stream exchangeStream(Stream stream) const override {
    return make_stream(std::exchange(current_stream, stream.id()));
  }

  // An event is the number of the stream on which it was recorded.
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    if (!*event) *event = new StreamId;
    *static_cast<StreamId*>(*event) = stream.id();
    log("record an event on stream " + std::to_string(stream.id()));
  }
  void block(void* event, const Stream& stream) const override {
    const std::string recorded = std::to_string(*static_cast<StreamId*>(event));
    log("stream " + std::to_string(stream.id()) + " waits for stream " + recorded);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<StreamId*>(event);
  }
  void synchronizeEvent(void*) const override { log("wait for an event"); }
  void synchronizeStream(const Stream&) const override { log("wait for a stream"); }
  void synchronizeDevice(DeviceIndex) const override { log("wait for the device"); }
};

struct ImitatedHooks final : at::CUDAHooksInterface {
  explicit ImitatedHooks(at::CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void init() const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, ImitatedGuard)

}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ImitatedHooks)
}

extern "C" int64_t set_stream(int64_t stream) { return std::exchange(current_stream, stream); }

// Returns the events since the last call, which the next call overwrites.
extern "C" const char* take_events() {
  static std::string taken;
  std::lock_guard<std::mutex> lock(log_mutex);
  return (taken = std::exchange(events, {})).c_str();
}
