-- Loaded after common.lua by the limiter's scripts: what a tenant has used lately.
-- Use is counted in slots of a second. The slots in a window are the present one and the sixty before it, so that nothing
-- can hide at the edge of a minute: in any sixty seconds there is at most what the limit allows.
local SLOT, NUM_SLOTS = 1000000, 61
local DAY = 86400000000
local WINDOW_KEPT_MS = 62000
local DAY_KEPT_MS = 172800000
local RESERVATION_KEPT_MS = 600000

local function window_key(tenant) return PREFIX .. 'window:' .. tenant end
local function day_key(tenant) return PREFIX .. 'day:' .. tenant end
local function running_key(tenant) return PREFIX .. 'running:' .. tenant end
local function reservation_key(id) return PREFIX .. 'reservation:' .. id end

-- Gives a request its concurrency slot for so many microseconds from now.
local function lease_slot(tenant, id, lease)
  call('ZADD', running_key(tenant), int(NOW + lease), id)
  call('PEXPIRE', running_key(tenant), int(math.ceil(lease / 1000)))
end
