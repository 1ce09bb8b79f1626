-- All workers whose announcement has not expired.
-- Returns a flat list: worker, JSON of the announcement, and so on, by worker id.
local known = call('ZRANGEBYSCORE', ANNOUNCED, '(' .. int(NOW), '+inf')
table.sort(known)
local found = {}
for _, worker in ipairs(known) do
  found[#found + 1] = worker
  found[#found + 1] = call('HGET', ANNOUNCEMENTS, worker)
end
return found
