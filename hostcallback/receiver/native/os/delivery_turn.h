// The turn in which one receiver of several delivers at a time.
#ifndef HOSTCALLBACK_OS_DELIVERY_TURN_H_
#define HOSTCALLBACK_OS_DELIVERY_TURN_H_

namespace hcb {

// Waits until no other thread has the turn, or one has kept it for 3 ms, and takes it. Any thread, which must
// not hold the interpreter lock. hcb_delivery_turn_give gives it.
void TakeDeliveryTurn();

}  // namespace hcb

#endif  // HOSTCALLBACK_OS_DELIVERY_TURN_H_
