-- Adds output tokens to the counters of the flows that they were made for.
-- ARGV: 2 weight of an output token; then for each flow: model, band, tenant, tokens
-- Returns 1.
local weight = tonumber(ARGV[2])
for i = 3, #ARGV, 4 do
  local model, band, tenant, tokens = ARGV[i], ARGV[i + 1], ARGV[i + 2], weight * tonumber(ARGV[i + 3])
  add_to_counter(band, model, tenant, counted(band, model, tenant, tokens))
  note_service(band, model, tokens)
end
return 1
