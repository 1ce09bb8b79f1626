-- Removes a lost worker's numbers and so its credit. Its epoch and sequence stay, so that stale reports stay stale; its
-- claims stay, because other gateways' sessions with it may live: owners undo their own, leases the rest.
-- ARGV: 2 worker, 3 epoch
-- Returns 1; 0, and changes nothing, if a newer epoch or nothing is known.
local epoch = call('HGET', worker_key(ARGV[2]), 'epoch')
if not epoch or compare(epoch, ARGV[3]) > 0 then return 0 end
call('HSET', worker_key(ARGV[2]), 'free_slots', '0', 'free_blocks', '0', 'reported_at', '0')
return 1
